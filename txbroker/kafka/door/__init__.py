"""The door to a real Kafka: what an owner asks of it, done by the client."""
