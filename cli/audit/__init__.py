"""Commands that audit transactions with Spark."""
