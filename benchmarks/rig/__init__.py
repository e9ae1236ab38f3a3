"""What measurements stand on: a proxy in a process of its own, logs filled as owners fill them."""
