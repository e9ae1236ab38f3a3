"""Measurements of relays and their sources."""
