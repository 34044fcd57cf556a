"""Measurements of a running training: throughput, diagnostics, divergence."""
