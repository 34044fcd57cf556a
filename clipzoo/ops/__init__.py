"""Score kernels, each beside its slow twin."""
