"""Predict memory, traffic and time of a training step on hardware you do not have at hand."""
