"""Encoders: two towers that stop before any projection."""
