"""Data sets made here or fetched from package registries."""
