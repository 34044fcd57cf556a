"""What the benchmarks share, and the parts of the benchmark of a GPU."""
