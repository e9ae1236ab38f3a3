"""The SQL of the outbox: its tables, what services write, what relays read and mark."""
