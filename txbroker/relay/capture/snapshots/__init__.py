"""Rows of captured tables at one moment, as their records show them."""
