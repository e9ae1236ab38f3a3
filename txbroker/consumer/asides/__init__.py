"""Copies of failed messages: set-aside keys and retried rows."""
