"""What txbroker is compared with, one file each; `benchmarks/compare.py` runs them."""
