"""What a run found: its summary, its news for the proxies, its HTML report."""
