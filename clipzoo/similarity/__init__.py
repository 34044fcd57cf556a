"""Implementations of `clipzoo.types.Scores`; objectives do not know which one they hold."""
