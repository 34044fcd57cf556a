"""Errors meant for the user."""


class ConfigError(ValueError):
    """Something that the user asked for cannot be: the message says what, the value seen, and the key to change."""


class TrainingError(RuntimeError):
    """Training cannot go on: the message says why and what is kept."""
