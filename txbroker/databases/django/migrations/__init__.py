"""Migrations of txbroker's tables."""
