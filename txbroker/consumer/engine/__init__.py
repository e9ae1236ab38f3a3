"""The engine of a consumer: hands out messages, calls handlers, takes results."""
