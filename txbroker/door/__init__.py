"""What an owner asks of Kafka, as protocols, and the parts that every implementation shares."""
