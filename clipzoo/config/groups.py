"""The folder of configuration groups and their options."""

from __future__ import annotations

from pathlib import Path

_PACKAGED = Path(__file__).resolve().parents[1] / "conf"
CONF = _PACKAGED if _PACKAGED.is_dir() else _PACKAGED.parents[1] / "conf"
"""The folder of the configuration groups: the wheel's clipzoo/conf, or conf of the checkout."""


def groups() -> list[str]:
    """Return the names of all groups; nested groups as "head/kernel"."""
    return sorted({str(path.parent.relative_to(CONF)) for path in CONF.rglob("*.yaml")} - {"."})


def is_group(name: str) -> bool:
    return bool(name) and (CONF / name).is_dir()


def options(group: str) -> list[str]:
    """Return the options of a group; experiments with the folder that holds them, "demo/clip"."""
    pattern = "**/*.yaml" if group == "experiment" else "*.yaml"
    paths = (path.relative_to(CONF / group).with_suffix("") for path in (CONF / group).glob(pattern))
    return sorted(str(path) for path in paths if not path.name.startswith("_"))
