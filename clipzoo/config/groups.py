"""The folders of configuration groups and their options: clipzoo's own, and one of the user's."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from clipzoo.errors import ConfigError

_PACKAGED = Path(__file__).resolve().parents[1] / "conf"
CONF = _PACKAGED if _PACKAGED.is_dir() else _PACKAGED.parents[1] / "conf"
"""The folder of the configuration groups: the wheel's clipzoo/conf, or conf of the checkout."""
VARIABLE = "CLIPZOO_CONFIG_DIR"
"""Environment variable with the user's folder; the option --config-dir sets it, so that child processes have it too."""


def own_folder() -> Path | None:
    """Return the user's folder of further options, laid out like CONF; None without one.

    Raises:
        ConfigError: it has no option of a group of CONF, or one that CONF has too.
    """
    given = os.environ.get(VARIABLE)
    return _checked(Path(given).expanduser().absolute()) if given else None


def search_path() -> list[str]:
    """Return the override that lets Hydra find the user's options; none without a folder of the user's."""
    folder = own_folder()
    quoted = str(folder).replace("\\", "\\\\").replace('"', '\\"')
    return [] if folder is None else [f'hydra.searchpath=["file://{quoted}"]']


def groups() -> list[str]:
    """Return the names of all groups; nested groups as "head/kernel"."""
    return sorted({str(path.parent) for path in (*_files(CONF), *_own_files())} - {"."})


def is_group(name: str) -> bool:
    return bool(name) and any((folder / name).is_dir() for folder in (CONF, own_folder()) if folder)


def options(group: str) -> list[str]:
    """Return the options of a group; experiments with the folder that holds them, "demo/clip"."""
    paths = [path.with_suffix("") for path in (*_files(CONF), *_own_files()) if path.is_relative_to(group)]
    names = (path.relative_to(group) for path in paths if not path.name.startswith("_"))
    return sorted(str(name) for name in names if group == "experiment" or len(name.parts) == 1)


def option_file(group: str, option: str) -> Path | None:
    """Return the file of an option, None if there is none."""
    places = [folder / group / f"{option}.yaml" for folder in (CONF, own_folder()) if folder]
    return next((path for path in places if path.exists()), None)


def _files(folder: Path) -> list[Path]:
    """Return the YAML files in the groups of a folder, relative to it."""
    groups = [path.name for path in CONF.iterdir() if path.is_dir()]
    return [path.relative_to(folder) for group in groups for path in (folder / group).rglob("*.yaml")]


def _own_files() -> list[Path]:
    folder = own_folder()
    return [] if folder is None else _files(folder)


@cache
def _checked(folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"--config-dir {folder} is not a folder")
    files = _files(folder)
    if not files:
        raise ConfigError(
            f"--config-dir {folder} has no options: it is laid out like clipzoo's conf, with experiment/NAME.yaml, "
            "head/NAME.yaml, ..."
        )
    for path in files:
        if (CONF / path).exists():
            raise ConfigError(f"{folder / path}: clipzoo has an option of this name, rename the file")
    return folder


def hide_internal_options() -> None:
    """Keep Hydra's help and completion from listing files that begin with an underscore: parts that options share."""
    from hydra._internal.core_plugins.file_config_source import FileConfigSource
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.object_type import ObjectType
    from hydra.core.plugins import Plugins

    class Listed(FileConfigSource):
        def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
            return [name for name in super().list(config_path, results_filter) if not name.startswith("_")]

    Plugins.instance()  # fills the registry
    SourcesRegistry.instance().types[Listed.scheme()] = Listed
