"""Compose a configuration from overrides and check it, without importing torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from clipzoo.config import schema
from clipzoo.config.groups import (
    COMMANDS,
    CONF,
    group_not_chosen,
    groups,
    is_group,
    own_folder,
    unknown_key,
    unknown_option,
)
from clipzoo.config.schema import UncheckableError, constructor_arguments, kind_of
from clipzoo.config.trust import PACKAGE, TRUST_KEY, is_within, parts_of, read, require_trusted, trusted_names
from clipzoo.errors import ConfigError
from clipzoo.io import Kind, shortened

RESOLVER = "oc.env"
MARK = "${" + RESOLVER + ":"
"""Beginning of an environment variable in a configuration."""
TOP_LEVEL = {
    "train": {
        "name": "str | None", "runs": "str", "upload_patience": "Seconds", "upload_every": "Seconds", "seed": "Seed",
        "row": "str | None",
    },
    "eval": {
        "run": "str | None", "averaged": "bool", "model": "str | None", "pretrained": "str | None", "row": "str | None",
        "output": "str | None", "device": "Literal['auto', 'cpu', 'cuda']", "timeout": "Seconds",
        "mix_with": "str | None", "mix": "list[Probability]",
    },
    "studies": {"folder": "str", "jobs": "Count | None", "studies": "list[str]"},
}  # fmt: skip
"""Keys that belong to no group, with their annotations, by the file in conf that has them."""
PARTS = {"train": ("encoder", "head", "objective", "data", "optim", "trainer", "logger", "eval"), "eval": ("eval",)}
"""Groups without which a configuration cannot be used."""
SEARCH = "search"
NOT_SETTINGS = ("hydra", "about", "trust", SEARCH)
"""Top-level keys that are never stored with a run: `about` holds an experiment's title, command and cost for the
report; `trust` is read only from the command line; `search` configures how a sweep draws its points."""


def compose(
    overrides: Sequence[str],
    name: str = "train",
    complete: bool = True,
    nodes: Mapping[str, Any] | None = None,
    trust: Collection[str] | None = None,
) -> dict[str, Any]:
    """Return the checked configuration of these overrides as plain values.

    name: the file in conf to start from, "train", "eval" or "studies". complete: require a value for every key.
    nodes: plain values to add before interpolations are resolved; a "${" in them is text. trust: classes and packages
    that may be named, for overrides of a file; None for the command line, whose overrides name them.

    Raises ConfigError with every fault.
    """
    for line in overrides if trust is not None else ():
        # `hydra.searchpath` imports packages.
        if re.split("[./@]", read(line).key_or_group)[0] in ("hydra", TRUST_KEY):
            raise ConfigError(f"{line} is an option only of the command line: remove it from the file")
    lines, config = _explained(overrides, name)
    content = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    valid_keys = [*content, *(path.name for path in CONF.iterdir()), *NOT_SETTINGS]
    for key in map(str, config):
        if key not in valid_keys:
            raise ConfigError(unknown_key(key, valid_keys))
    if nodes:
        OmegaConf.set_struct(config, False)
        # A "${" in their strings is escaped, so that OmegaConf reads no interpolation.
        config.update(schema.mapped(nodes, lambda text: re.sub(r"(\\*)\$\{", r"\1\1\\${", text)))
    return checked(config, trusted_names(lines) if trust is None else trust, complete, name)


def compose_search(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the checked `search` node of these overrides, as plain values. Raises ConfigError."""
    node: dict[str, Any] = OmegaConf.to_container(_explained(overrides, "train")[1][SEARCH], resolve=True)  # type: ignore
    if faults := schema.faults({SEARCH: node}):
        raise ConfigError("\n         ".join(faults))
    return node


def checked(config: DictConfig, trust: Collection[str], complete: bool = True, name: str = "train") -> dict[str, Any]:
    """Return the configuration as plain values, without NOT_SETTINGS.

    Interpolations are resolved, except environment variables in texts; `with_variables` resolves these.

    trust: classes and packages that the command line trusts; see `trusted_names`. name: as for `compose`.

    Raises ConfigError, which names every unknown key, wrong value and, if `complete`, missing value; or else every
    relation that does not hold.
    """
    try:
        missing_keys = sorted(OmegaConf.missing_keys(config))
        container = without_variables(config)
    except OmegaConfBaseException as error:
        raise ConfigError(_first_line(error)) from None
    except RecursionError:
        raise ConfigError("an interpolation ${...} refers to itself") from None
    assert isinstance(container, dict)
    plain = {str(key): value for key, value in container.items() if key not in NOT_SETTINGS}
    require_trusted(plain, trust)
    faults = [f"{key} has no value: give {key}=..." for key in missing_keys if complete]
    for key, annotation in TOP_LEVEL[name].items():
        kind = kind_of(annotation)
        if key not in plain:
            faults.append(f"{key} has no value: give {key}=...")
        elif not kind.admits(plain[key]):
            faults.append(f"{key} must be {kind.words}, not {shortened(plain[key], 100)}")
    for group in PARTS.get(name, ()):
        part = plain.get(group)
        if not isinstance(part, Mapping) or "_target_" not in part:
            faults.append(f"{group} has no class (_target_): choose an option, {group}=...")
    not_given = tuple(f"{key} must be" for key in missing_keys)
    faults += [fault for fault in schema.faults(plain) if not fault.startswith(not_given)]
    faults += schema.faults({SEARCH: container.get(SEARCH)})
    if faults := faults or list(schema.broken(schema.RUN, plain)):
        raise ConfigError("\n         ".join(faults))
    return plain


def _explained(overrides: Sequence[str], name: str) -> tuple[list[str], DictConfig]:
    """Return the overrides in Hydra's grammar and their configuration; errors of Hydra as ConfigErrors."""
    lines = [str(read(override).input_line) for override in overrides]
    try:
        return lines, _compose(lines, name)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explanation(error, lines, name)) from None


def _compose(lines: list[str], name: str) -> DictConfig:
    if GlobalHydra.instance().is_initialized():
        return hydra.compose(name, lines)
    if folder := own_folder():
        # Hydra also finds the options of the user's folder.
        quoted = str(folder).replace("\\", "\\\\").replace('"', '\\"')
        lines = [f'hydra.searchpath=["file://{quoted}"]', *lines]
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose(name, lines)


def _explanation(error: Exception, lines: list[str], name: str) -> str:
    """Return Hydra's error as one sentence with the nearest valid key or option."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        file = error.missing_cfg_file
        group, _, option = file.partition("/") if file.startswith("experiment/") else file.rpartition("/")
        return unknown_option(group, option)
    if "@experiment." in str(error):
        return "the first line of an experiment must be `# @package _global_`: its keys are those of the whole run"
    if key := re.search(r"Could not override '([^']+)'", str(error)):
        if name == "train" and "/" in key[1] and is_group(key[1]):
            return group_not_chosen(key[1])
        if name == "train" and (command := COMMANDS.get(key[1].split(".")[0])):
            return f"{key[1]} is a setting of `{command}`, not of a training"
        # Hydra's cause holds the configuration. Its values and inner mappings, by dotted key.
        values: dict[str, Any] = {}
        if (parent := getattr(error.__cause__, "parent_node", None)) is not None:
            container: Any = OmegaConf.to_container(parent._get_root(), resolve=False)
            container.pop("hydra", None)
            values = parts_of(container)
        for mapping in (key[1], key[1].rpartition(".")[0]):
            # Hydra has replaced a number or a text by a mapping: only the chosen options tell its original type.
            chosen = [line for line in lines if is_group(read(line).key_or_group)]
            if values.get(mapping) == {} and OmegaConf.select(_compose(chosen, name), mapping) == {}:
                return f"{mapping} takes any keys, which are added with a plus: +{mapping}={{KEY: VALUE}}"
        return unknown_key(key[1], groups() + sorted(values))
    return _first_line(error)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and (missing := re.search(r"Missing mandatory value: (\S+)", lines[0])):
        return f"{missing[1]} has no value: give {missing[1]}=..."
    key = getattr(error, "full_key", None)
    place = f"{key}: " if key and lines and key not in lines[0] else ""
    return place + lines[0] if lines else type(error).__name__


def without_variables(config: DictConfig) -> Any:
    """Return the configuration as plain values, with all interpolations resolved except environment variables.

    `${oc.env:NAME}` remains as text, also in stored files, wherever the constructor's annotation admits any text.
    Elsewhere (numbers, named options) its value is inserted, which is not a secret and may change the result of a run.
    """

    def variable(name: str, *default: str | None) -> str:
        quoted = ["null" if value is None else "'" + str(value).replace("'", "\\'") + "'" for value in default]
        return MARK + ",".join([name, *quoted]) + "}"

    def decoded(text: str | None, _parent_: Any, _node_: Any) -> Any:
        return "${oc.decode:" + text + "}" if text is not None and MARK in text else oc.decode(text, _parent_, _node_)

    OmegaConf.register_new_resolver(RESOLVER, variable, replace=True)
    OmegaConf.register_new_resolver("oc.decode", decoded, replace=True)
    try:
        text = OmegaConf.to_container(config, resolve=True)
    finally:
        OmegaConf.register_new_resolver(RESOLVER, oc.env, replace=True)
        OmegaConf.register_new_resolver("oc.decode", oc.decode, replace=True)
    return _merged(OmegaConf.to_container(config, resolve=True), text) if MARK in repr(text) else text


def _merged(value: Any, text: Any, kind: Kind | None = None) -> Any:
    """Return `text`, with `value` where the argument admits no text. kind: kind of the argument; None if unknown."""
    if value == text:
        return value
    if isinstance(value, dict) and isinstance(text, dict) and value.keys() == text.keys():
        # The classes of this package say what their arguments admit.
        kinds: dict[str, Kind] = {}
        if is_within(str(value.get("_target_")), (PACKAGE,)):
            with suppress(LookupError, SyntaxError):
                for name, argument in constructor_arguments(value["_target_"]).items():
                    with suppress(UncheckableError):
                        if argument.annotation is not None:
                            kinds[name] = kind_of(argument.annotation)
        merged: Any = {key: _merged(value[key], text[key], kinds.get(key)) for key in value}
    elif isinstance(value, list) and isinstance(text, list) and len(value) == len(text):
        merged = [_merged(*pair) for pair in zip(value, text, strict=True)]
    elif kind is None:
        return value if isinstance(value, int | float | None) else text
    else:
        merged = text
    return value if kind is not None and kind.admits(value) and not kind.admits(merged) else merged
