"""The measurements of consumers; `benchmarks/consuming.py` runs them."""
