"""`txbroker outbox` and `txbroker capture`."""
