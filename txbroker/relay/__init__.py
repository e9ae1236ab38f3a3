"""Relays: what a database transaction wrote becomes visible in Kafka, exactly once."""
