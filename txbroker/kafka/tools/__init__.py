"""Kafka as commands and the audit see it: examination, repair, counts and the audit topic."""
