"""Triton kernels of the operations, for GPUs."""
