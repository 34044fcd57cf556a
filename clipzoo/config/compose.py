"""From the command line to a checked configuration, without importing torch."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from clipzoo.config import renamed, schema
from clipzoo.errors import ConfigError, TrainingError

_PACKAGED = Path(__file__).resolve().parents[1] / "conf"
CONF = _PACKAGED if _PACKAGED.is_dir() else _PACKAGED.parents[1] / "conf"
"""The folder of the configuration groups: the wheel's clipzoo/conf, or conf of the checkout."""

TOP_LEVEL: dict[str, tuple[type, ...]] = {
    "name": (str, type(None)),
    "runs": (str,),
    "seed": (int,),
    "row": (str, type(None)),
}
"""The values of train.yaml that belong to no group, and their types."""

ASIDE = ("hydra", "about")
"""Top-level keys that are no setting of a run: `about` holds an experiment's title, command and cost for the report."""

HARMLESS = (
    "name", "runs", "logger", "eval", "data.workers", "data.prefetch", "data.max_bad_fraction", "data.index_folder",
    "data.cache_folder", "data.cache_gigabytes", "encoder.image_tower.checkpoint", "encoder.text_tower.checkpoint",
    "trainer.log_every", "trainer.save_every", "trainer.keep", "trainer.micro_batch", "trainer.device",
    "trainer.timeout", "trainer.tile", "trainer.compile", "trainer.loss_limit", "trainer.best_metric",
    "trainer.save_in_background", "trainer.head_products",
)  # fmt: skip
"""Keys that change what a run costs or shows, and no more of what it computes than another device's rounding would: a
run may be resumed with others."""

ELSEWHERE = {
    "accum_freq": "trainer.micro_batch", "batch_size": "trainer.global_batch", "beta1": "optim.betas",
    "beta2": "optim.betas", "dataset": "data", "grad_clip_norm": "trainer.clip_gradient",
    "learning_rate": "optim.schedule.peak", "logs": "runs", "loss": "objective", "lr": "optim.schedule.peak",
    "model": "encoder", "report_to": "logger.wandb", "save_frequency": "trainer.save_every",
    "train_data": "data.shards", "warmup": "optim.schedule.warmup_steps", "wd": "optim.weight_decay",
}  # fmt: skip
"""What other programs, open_clip above all, call our keys."""


def check_command_line(arguments: list[str], name: str = "train") -> None:
    """Exit with code 2 and one clear message when the overrides make no valid configuration."""
    options = _parsed(arguments)
    if options.help or options.hydra_help or options.info or options.shell_completion:
        return
    overrides = options.overrides
    if options.cfg and options.multirun:
        leave(ConfigError("--cfg shows one configuration: leave out -m (--multirun)"))
    try:
        for point in _sweep_points(overrides):
            composed(point, name, complete=options.cfg is None)
    except ConfigError as error:
        leave(error)


def for_hydra(arguments: list[str]) -> list[str]:
    """The same command line as Hydra wants it: options first, shard ranges in quotes of its own ("{0..9}.tar")."""
    overrides = _parsed(arguments).overrides
    ranges = re.compile(r"""[^\s,=\[\]"']*\{\d+\.\.\d+\}[^\s,\[\]"']*""")
    quoted = [each if {'"', "'"} & set(each) else ranges.sub(lambda found: f'"{found[0]}"', each) for each in overrides]
    return [each for each in arguments if each not in overrides] + quoted


def leave(error: ConfigError | TrainingError) -> NoReturn:
    """Say what is wrong and exit, with code 2 where the user can change it."""
    print(f"clipzoo: {error}", file=sys.stderr)
    sys.exit(2 if isinstance(error, ConfigError) else 1)


def composed(overrides: list[str], name: str = "train", complete: bool = True) -> DictConfig:
    """The checked configuration of these overrides; every fault found is named in one ConfigError.

    complete: a value that is still to be given is a fault too.
    """
    for each in overrides:
        _read(each)
    try:
        config = _compose(overrides, name)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explained(error, overrides, name)) from None
    known = [*yaml.safe_load((CONF / f"{name}.yaml").read_text()), *(each.name for each in CONF.iterdir()), "about"]
    for key in map(str, config):
        if key not in known:
            raise ConfigError(f"there is no key {key}{_nearest(key, known)}")
    check(config, complete)
    return config


def check(config: DictConfig, complete: bool = True) -> None:
    """Raise a ConfigError that names every unknown key, wrong type and, if it is to be complete, missing value."""
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        plain = resolved(config)
    except OmegaConfBaseException as error:
        raise ConfigError(_first_line(error)) from None
    found = [f"{key} has no value: give {key}=..." for key in missing if complete]
    found += [
        f"{key} must be {' or '.join(each.__name__ for each in types)}, not {plain[key]!r}"
        for key, types in TOP_LEVEL.items()
        if key in plain and not isinstance(plain[key], types)
    ]
    seed = plain.get("seed")
    if isinstance(seed, int) and not 0 <= seed < 2**63:
        found.append(f"seed must lie between 0 and 2^63 - 1, not {seed}")
    found += [each for each in schema.faults(plain) if not each.startswith(tuple(f"{key} must be" for key in missing))]
    if found:
        raise ConfigError("\n         ".join(found))


def resolved(config: DictConfig) -> dict[str, Any]:
    """The configuration as plain values, interpolations resolved, without Hydra's settings and the `about` node."""
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key not in ASIDE}


def identity(plain: Mapping[str, Any]) -> dict[str, Any]:
    """What shapes the result of a run: the flat configuration without the harmless keys."""
    return {
        key: value
        for key, value in flat(renamed.first(plain)).items()
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


def _parsed(arguments: list[str]) -> Namespace:
    """Hydra's options and the overrides. Leaves with a message where there is no such option."""
    options, unknown = get_args_parser().parse_known_intermixed_args(arguments)
    if unknown:
        key = unknown[0].lstrip("-").split("=")[0].replace("-", "_")
        leave(ConfigError(f"there is no option {unknown[0]}; values are given as {ELSEWHERE.get(key, key)}=VALUE"))
    return options


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def _compose(overrides: list[str], name: str) -> DictConfig:
    if GlobalHydra.instance().is_initialized():
        return compose(name, overrides)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(name, overrides)


def _sweep_points(overrides: list[str]) -> list[list[str]]:
    """Command lines that together hold every value of every sweep; one where nothing is swept."""
    choices = []
    for text in overrides:
        override = _read(text)
        if override.is_sweep_override() and override.is_discrete_sweep():
            choices.append([f"{text.split('=', 1)[0]}={value}" for value in override.sweep_string_iterator()])
        elif not override.is_sweep_override():
            choices.append([text])
    width = max((len(each) for each in choices), default=1)
    return [[each[min(index, len(each) - 1)] for each in choices] for index in range(width)]


def _read(text: str) -> Override:
    """One override in Hydra's grammar; a ConfigError where it is none, or names no option of a group."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        said = [line for line in str(error).splitlines() if not line.startswith(("Error parsing", "See https"))]
        how = "quote brackets and commas once more: \"key='...'\"" if "=" in text else "write KEY=VALUE"
        raise ConfigError(
            f"{text!r} cannot be read ({said[0].strip() if said else 'no reason given'}): {how}"
        ) from None
    group = override.key_or_group
    if not group:
        raise ConfigError(f"{text!r} names no key: write KEY=VALUE")
    # What is added (+encoder={...}, as evaluation does) is a value of its own.
    aside = override.is_delete() or override.is_add() or override.is_sweep_override()
    chosen = (CONF / group).is_dir() and not aside
    if chosen and not isinstance(override.value(), str | list):
        raise ConfigError(_no_option(group, text.partition("=")[2]))
    return override


def _explained(error: Exception, overrides: list[str], name: str) -> str:
    """Hydra's error as one sentence with the nearest valid key or option."""
    text = str(error)
    if unknown := re.search(r"Could not override '([^']+)'", text):
        return f"there is no key {unknown[1]}{_nearest(unknown[1], _known_keys(overrides, name))}"
    if unknown := re.search(r"Could not find '([^']+)'", text):
        experiment = unknown[1].startswith("experiment/")
        group, _, option = unknown[1].partition("/") if experiment else unknown[1].rpartition("/")
        return _no_option(group, option)
    return _first_line(error)


def _no_option(group: str, option: str) -> str:
    options = _options(group)
    # Of many experiments those in the same folder, or the folders.
    folder = f"{option.split('/')[0]}/"
    near = [each for each in options if each.startswith(folder)] or list(
        dict.fromkeys(f"{each.split('/')[0]}/..." if "/" in each else each for each in options)
    )
    return f"there is no {group}={option}{schema.nearest(option, options)} (options: {', '.join(near)})"


def _nearest(key: str, known: list[str]) -> str:
    elsewhere = ELSEWHERE.get(key.rsplit(".", 1)[-1])
    return f"; did you mean {elsewhere}?" if elsewhere else schema.nearest(key, known)


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
