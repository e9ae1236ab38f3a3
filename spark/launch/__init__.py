"""What a start of Spark needs: Java, the Kafka connector, and errors in words."""
