"""Weights from elsewhere: names matched, positional embeddings resized, nothing filled by half."""
