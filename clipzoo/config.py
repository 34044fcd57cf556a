"""From the command line to a checked configuration, without importing torch."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from clipzoo import schema
from clipzoo.errors import ConfigError, TrainingError

CONF = Path(__file__).resolve().parent.parent / "conf"
"""The configuration groups of the checkout."""

TOP_LEVEL: dict[str, tuple[type, ...]] = {
    "name": (str, type(None)),
    "runs": (str,),
    "seed": (int,),
    "row": (str, type(None)),
}
"""The values of train.yaml that belong to no group, and their types."""

HARMLESS = (
    "name", "runs", "logger", "eval", "data.workers", "trainer.log_every", "trainer.save_every", "trainer.keep",
    "trainer.micro_batch", "trainer.device", "trainer.timeout", "trainer.tile", "trainer.compile", "trainer.loss_limit",
    "trainer.best_metric", "trainer.save_in_background", "trainer.head_products",
)  # fmt: skip
"""Keys that change what a run costs or shows, and no more of what it computes than another device's rounding would: a
run may be resumed with others."""


def check_command_line(arguments: list[str], name: str = "train") -> None:
    """Exit with code 2 and one clear message when the overrides make no valid configuration."""
    options = get_args_parser().parse_intermixed_args(arguments)
    if options.help or options.hydra_help or options.info:
        return
    overrides = options.overrides
    try:
        for point in _sweep_points(overrides):
            composed(point, name)
    except ConfigError as error:
        leave(error)


def for_hydra(arguments: list[str]) -> list[str]:
    """The same command line as Hydra wants it: options first, shard ranges in quotes of its own ("{0..9}.tar")."""
    overrides = get_args_parser().parse_intermixed_args(arguments).overrides
    ranges = re.compile(r"""[^\s,=\[\]"']*\{\d+\.\.\d+\}[^\s,\[\]"']*""")
    quoted = [each if {'"', "'"} & set(each) else ranges.sub(lambda found: f'"{found[0]}"', each) for each in overrides]
    return [each for each in arguments if each not in overrides] + quoted


def leave(error: ConfigError | TrainingError) -> None:
    """Say what is wrong and exit, with code 2 where the user can change it."""
    print(f"clipzoo: {error}", file=sys.stderr)
    sys.exit(2 if isinstance(error, ConfigError) else 1)


def composed(overrides: list[str], name: str = "train") -> DictConfig:
    """The checked configuration of these overrides; every fault found is named in one ConfigError."""
    try:
        config = _compose(overrides, name)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explained(error, overrides, name)) from None
    check(config)
    return config


def check(config: DictConfig) -> None:
    """Raise a ConfigError that names every missing value, unknown key and wrong type."""
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise ConfigError("; ".join(f"{key} has no value: give {key}=..." for key in missing))
        plain = resolved(config)
    except OmegaConfBaseException as error:
        raise ConfigError(_first_line(error)) from None
    found = [
        f"{key} must be {' or '.join(each.__name__ for each in types)}, not {plain[key]!r}"
        for key, types in TOP_LEVEL.items()
        if key in plain and not isinstance(plain[key], types)
    ]
    found += schema.faults(plain)
    if found:
        raise ConfigError("\n         ".join(found))


def resolved(config: DictConfig) -> dict[str, Any]:
    """The configuration as plain values, interpolations resolved."""
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key != "hydra"}


def identity(plain: Mapping[str, Any]) -> dict[str, Any]:
    """What shapes the result of a run: the flat configuration without the harmless keys."""
    return {
        key: value
        for key, value in flat(plain).items()
        if not any(key == harmless or key.startswith(f"{harmless}.") for harmless in HARMLESS)
    }


def run_name(plain: Mapping[str, Any], experiment: str | None) -> str:
    """The given name, or one found from the experiment and the identity of the run."""
    if plain["name"]:
        return str(plain["name"])
    digest = hashlib.sha256(json.dumps(identity(plain), sort_keys=True).encode()).hexdigest()[:8]
    stem = experiment or "-".join(plain[part]["_target_"].rsplit(".", 1)[-1] for part in ("head", "objective"))
    return f"{stem.replace('/', '-').lower()}-{digest}"


def flat(plain: Any, path: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping of dotted keys."""
    if not isinstance(plain, Mapping) or not plain:
        return {path: plain}
    return {key: value for name, inner in plain.items() for key, value in flat(inner, _join(path, name)).items()}


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def _compose(overrides: list[str], name: str) -> DictConfig:
    if GlobalHydra.instance().is_initialized():
        return compose(name, overrides)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(name, overrides)


def _sweep_points(overrides: list[str]) -> list[list[str]]:
    """Command lines that together hold every value of every sweep; one where nothing is swept."""
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ConfigError(_first_line(error)) from None
    choices = []
    for text, override in zip(overrides, parsed, strict=True):
        if override.is_sweep_override() and override.is_discrete_sweep():
            choices.append([f"{text.split('=', 1)[0]}={value}" for value in override.sweep_string_iterator()])
        elif not override.is_sweep_override():
            choices.append([text])
    width = max((len(each) for each in choices), default=1)
    return [[each[min(index, len(each) - 1)] for each in choices] for index in range(width)]


def _explained(error: Exception, overrides: list[str], name: str) -> str:
    """Hydra's error as one sentence with the nearest valid key or option."""
    text = str(error)
    if unknown := re.search(r"Could not override '([^']+)'", text):
        return f"there is no key {unknown[1]}{schema.nearest(unknown[1], _known_keys(overrides, name))}"
    if unknown := re.search(r"Could not find '([^']+)'", text):
        experiment = unknown[1].startswith("experiment/")
        group, _, option = unknown[1].partition("/") if experiment else unknown[1].rpartition("/")
        options = _options(group)
        listed = ", ".join(options)
        return f"there is no {group}={option}{schema.nearest(option, options)} (options: {listed})"
    return _first_line(error)


def _options(group: str) -> list[str]:
    """The options of a group; experiments are sorted into folders."""
    pattern = "**/*.yaml" if group == "experiment" else "*.yaml"
    found = (path.relative_to(CONF / group).with_suffix("") for path in (CONF / group).glob(pattern))
    return sorted(str(path) for path in found if not path.name.startswith("_"))


def _known_keys(overrides: list[str], name: str) -> list[str]:
    """Groups and dotted keys of the configuration with only the groups that these overrides choose."""
    groups = sorted({str(path.parent.relative_to(CONF)) for path in CONF.rglob("*.yaml")} - {"."})
    chosen = [each for each in overrides if each.lstrip("+~").split("=")[0].split("@")[0] in groups]
    try:
        keys = flat(OmegaConf.to_container(_compose(chosen, name), resolve=False))
    except (HydraException, OmegaConfBaseException):
        return groups
    prefixes = {key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1)}
    return groups + sorted({*keys, *prefixes})


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
