"""Fast kernels; each has a slow reference implementation of the same signature, here or in its test."""
