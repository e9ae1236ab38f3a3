"""The audit as a stream."""
