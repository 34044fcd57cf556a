"""Encoders: image and text towers without projections."""
