"""Checkpoints: the state of a training, its files, and how they are read."""
