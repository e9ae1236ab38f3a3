"""Rows of databases against the records of their relays and captures."""
