"""TLS contexts, timers and retries, for servers and clients alike."""
