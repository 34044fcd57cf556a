"""Implementations of `clipzoo.types.Scores`."""
