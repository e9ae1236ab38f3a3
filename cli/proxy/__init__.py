"""Commands that run proxies, and the processes of their workers."""
