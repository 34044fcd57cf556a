"""Values of a configuration that are found in the model, such as `image_size: from_model:image_size`.

They remain as they are while the configuration is composed and checked, and while its run is looked up, because no
model is built until then: `clipzoo.api.build.with_facts` fills them in. The run's config.yaml holds the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clipzoo.errors import ConfigError, nearest

PREFIX = "from_model:"


def is_open(value: object) -> bool:
    """Return True for a value that is found in the model."""
    return isinstance(value, str) and value.startswith(PREFIX)


def has_open(plain: Any) -> bool:
    """Return True if any value in a configuration is found in the model."""
    if isinstance(plain, Mapping):
        return any(map(has_open, plain.values()))
    return any(map(has_open, plain)) if isinstance(plain, list) else is_open(plain)


def emptied(plain: Any) -> Any:
    """Return the configuration with null in place of the values that are found in the model."""
    return _replaced(plain, lambda value: None)


def filled(plain: Any, facts: Mapping[str, Any]) -> Any:
    """Return the configuration with the values that are found in the model.

    Raises:
        ConfigError: the model has no value of a name.
    """

    def value_of(value: str) -> Any:
        name = value.removeprefix(PREFIX)
        if name not in facts:
            raise ConfigError(f"{value}: this encoder gives no value {name}{nearest(name, list(facts))}")
        return facts[name]

    return _replaced(plain, value_of)


def _replaced(plain: Any, value_of: Any) -> Any:
    if isinstance(plain, Mapping):
        return {key: _replaced(value, value_of) for key, value in plain.items()}
    if isinstance(plain, list):
        return [_replaced(value, value_of) for value in plain]
    return value_of(plain) if is_open(plain) else plain
