"""Measurements that several benchmarks use, and the parts of the benchmark of a GPU."""
