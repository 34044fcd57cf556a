"""Fast score kernels, each beside a slow twin of the same signature."""
