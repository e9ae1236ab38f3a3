"""Operating groups of consumers: their state, and messages that were set aside or are dead."""
