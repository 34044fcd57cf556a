"""A configuration as one mapping of dotted keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(plain: Any, path: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping of dotted keys."""
    if not isinstance(plain, Mapping) or not plain:
        return {path: plain}
    return {
        key: value
        for name, inner in plain.items()
        for key, value in flat(inner, f"{path}.{name}" if path else str(name)).items()
    }
