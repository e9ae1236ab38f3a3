"""Metrics, rates, readiness and log of a proxy."""
