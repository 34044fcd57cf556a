"""Errors meant for the user."""


class ConfigError(ValueError):
    """Something that the user asked for cannot be: the message says what, the value seen, and the key to change."""
