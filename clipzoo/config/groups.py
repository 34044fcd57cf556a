"""Folders of configuration groups and their options: clipzoo's conf and the user's folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import yaml

from clipzoo.errors import ConfigError, nearest

_PACKAGED = Path(__file__).resolve().parents[1] / "conf"
CONF = _PACKAGED if _PACKAGED.is_dir() else _PACKAGED.parents[1] / "conf"
"""The folder of the configuration groups: the wheel's clipzoo/conf, or conf of the checkout."""
COMMANDS = {"lab": "clipzoo lab", "study": "clipzoo studies"}
"""Groups that only these commands read."""
VARIABLE = "CLIPZOO_CONFIG_DIR"
"""Environment variable with the user's folder; the option --config-dir sets it, so that child processes have it too."""

FOREIGN_KEYS = {
    "accum_freq": "trainer.micro_batch", "batch_size": "trainer.global_batch", "beta1": "optim.betas",
    "beta2": "optim.betas", "checkpoint": "init.weights", "ckpt": "init.weights", "dataset": "data",
    "grad_clip_norm": "trainer.clip_gradient", "learning_rate": "optim.schedule.peak", "logs": "runs",
    "loss": "objective", "lr": "optim.schedule.peak", "model": "encoder", "path": "data=table",
    "pretrained": "init.weights", "report_to": "logger", "save_every": "trainer.checkpoints.every",
    "save_frequency": "trainer.checkpoints.every", "tensorboard": "logger=tensorboard", "train_data": "data.shards",
    "wandb": "logger=wandb", "warmup": "optim.schedule.warmup_steps", "wd": "optim.weight_decay",
}  # fmt: skip
"""Names that other programs, above all open_clip, use for our keys."""
FOREIGN_KEYS_OF_EVALUATION = {"checkpoint": "run", "ckpt": "run", "weights": "pretrained"}


def own_folder() -> Path | None:
    """Return the user's folder, laid out like CONF, or None. Raises ConfigError if it has no option, or one of CONF."""
    folder = os.environ.get(VARIABLE)
    return _checked(Path(folder).expanduser().absolute()) if folder else None


def groups() -> list[str]:
    """Return the names of all groups; nested groups as "head/kernel"."""
    return sorted({str(path.parent) for folder in _folders() for path in _files(folder)} - {"."})


def is_group(name: str) -> bool:
    return bool(name) and any((folder / name).is_dir() for folder in _folders())


def options(group: str) -> list[str]:
    """Return the options of a group; experiments with the folder that holds them, "demo/clip"."""
    paths = [path.with_suffix("") for folder in _folders() for path in _files(folder) if path.is_relative_to(group)]
    names = (path.relative_to(group) for path in paths if not path.name.startswith("_"))
    return sorted(str(name) for name in names if group == "experiment" or len(name.parts) == 1)


def option_file(group: str, option: str) -> Path | None:
    """Return the file of an option, None if there is none."""
    return next((path for folder in _folders() if (path := folder / group / f"{option}.yaml").exists()), None)


def _folders() -> list[Path]:
    return [folder for folder in (CONF, own_folder()) if folder is not None]


def _files(folder: Path) -> list[Path]:
    """Return the YAML files in the groups of a folder, relative to it."""
    groups = [path.name for path in CONF.iterdir() if path.is_dir()]
    return [path.relative_to(folder) for group in groups for path in (folder / group).rglob("*.yaml")]


@cache
def _checked(folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"--config-dir {folder} is not a folder")
    if not (files := _files(folder)):
        raise ConfigError(f"--config-dir {folder} has no options: it is laid out like clipzoo's conf, head/NAME.yaml")
    for path in files:
        if (CONF / path).exists():
            raise ConfigError(f"{folder / path}: clipzoo has an option of this name, rename the file")
    return folder


def hide_internal_options() -> None:
    """Keep Hydra's help and completion from listing parts that options share, whose names begin with an underscore, and
    the groups that only `clipzoo lab` and `clipzoo studies` read."""
    from hydra._internal.core_plugins.file_config_source import FileConfigSource
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.object_type import ObjectType
    from hydra.core.plugins import Plugins

    class Listed(FileConfigSource):
        def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
            names = super().list(config_path, results_filter)
            return [name for name in names if not name.startswith("_") and (config_path or name not in COMMANDS)]

    Plugins.instance()  # fills the registry
    SourcesRegistry.instance().types[Listed.scheme()] = Listed


def unknown_key(key: str, known: Sequence[str]) -> str:
    """Return the message for a key that does not exist."""
    suggestion = (FOREIGN_KEYS_OF_EVALUATION if "run" in known else FOREIGN_KEYS).get(key.rsplit(".", 1)[-1])
    return f"there is no key {key}" + (f"; did you mean {suggestion}?" if suggestion else nearest(key, known))


def group_not_chosen(group: str) -> str:
    """Return the message for a group inside another one, whose chosen option does not have it."""
    outer, _, inner = group.rpartition("/")
    choices = []
    for option in options(outer):
        file = option_file(outer, option)
        assert file is not None
        defaults = yaml.safe_load(file.read_text()).get("defaults", [])
        if inner in [name.removeprefix("override ") for entry in defaults if isinstance(entry, dict) for name in entry]:
            choices.append(f"{outer}={option}")
    return f"{group} is a group of {' and '.join(choices)}: choose it too"


def unknown_option(group: str, option: str) -> str:
    """Return the message for an option that its group does not have."""
    if group == "hydra/sweeper":
        return f"there is no {group}={option}: a search draws its points with search.sampler=tpe"
    names = options(group)
    folder = f"{option.split('/')[0]}/"
    # Options sorted into folders are many: list those of the same folder, or only the folders.
    listed_options = [name for name in names if name.startswith(folder)] or list(
        dict.fromkeys(f"{name.split('/')[0]}/..." if "/" in name else name for name in names)
    )
    suggestion = nearest(option, names)
    if option == "null":  # means nothing, not the option with the most similar letters
        suggestion = f"; did you mean {group}=none?" if "none" in names else ""
    return f"there is no {group}={option}{suggestion} (options: {', '.join(listed_options)})"
