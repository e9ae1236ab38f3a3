"""The audit: Spark reads the topics themselves and proves how every transaction ended."""
