"""Kafka records as narrow rows in Parquet."""
