"""Kafka's wire protocol: schemas, error codes, batches and the state of a transaction. No I/O."""
