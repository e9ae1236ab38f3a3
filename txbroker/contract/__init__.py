"""What clients and proxies exchange: requests, answers, session frames, JSON and signatures."""
