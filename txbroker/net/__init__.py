"""TLS contexts and timers, for servers and clients alike."""
