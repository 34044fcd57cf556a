"""Predict memory, traffic and time of a training step on machines that are not here."""
