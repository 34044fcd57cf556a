"""Environment variables in a stored configuration, `${oc.env:NAME}`, and their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from clipzoo.config.compose import MARK
from clipzoo.errors import ConfigError


def with_variables(plain: Any) -> Any:
    """Return plain values with the environment variables in them resolved.

    Raises:
        ConfigError: a variable is not set.
    """
    if isinstance(plain, Mapping):
        return {key: with_variables(value) for key, value in plain.items()}
    if isinstance(plain, list):
        return [with_variables(value) for value in plain]
    if not isinstance(plain, str) or MARK not in plain:
        return plain
    try:
        return OmegaConf.to_container(OmegaConf.create([plain]), resolve=True)[0]  # type: ignore[index]
    except OmegaConfBaseException as error:
        raise ConfigError(f"{plain} cannot be resolved: {str(error).splitlines()[0]}") from None


def uses_variables(plain: Any) -> bool:
    """Return True if any text in plain values contains an environment variable."""
    return MARK in repr(plain)
