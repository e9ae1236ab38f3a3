"""Tables that audits keep: transactions, attempts, drift, runs and latency."""
