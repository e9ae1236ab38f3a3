"""The rules of consuming: positions, order, failures, and the assignment of partitions."""
