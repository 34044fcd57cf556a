"""Packages that a logger needs and clipzoo does not install by itself."""

from __future__ import annotations

import importlib.util

from clipzoo.errors import ConfigError, installation


def require_package(package: str, extra: str, choice: str) -> None:
    """Raise ConfigError if a package is not installed. choice: the override that asks for it."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{choice} needs {package}, which is not installed: {installation(extra)}")
