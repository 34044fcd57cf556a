"""The folder of a run: its configuration, its results, whether it is finished. Needs no torch."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from clipzoo import config as configuration
from clipzoo import lock
from clipzoo.errors import ConfigError
from clipzoo.evaluation.protocol import protocol

PACKAGES = ("torch", "torchvision", "open_clip_torch", "timm", "webdataset", "numpy")


def claim(folder: Path, plain: Mapping[str, Any]) -> None:
    """Take the folder for this configuration, once all that it names has been found."""
    folder.mkdir(parents=True, exist_ok=True)
    lock.hold(folder)
    # Only now: the one that held it may have been of another configuration.
    refuse_another(folder, plain)
    write_whole(folder / "config.yaml", yaml.safe_dump(dict(plain), sort_keys=False))


def refuse_another(folder: Path, plain: Mapping[str, Any]) -> None:
    """Raise when the folder holds a run of another configuration."""
    path = folder / "config.yaml"
    if not path.exists():
        return
    before, now = configuration.identity(yaml.safe_load(path.read_text())), configuration.identity(plain)
    different = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if different:
        shown = ", ".join(f"{key} {before.get(key)!r} -> {now.get(key)!r}" for key in different[:6])
        more = f" and {len(different) - 6} more" if len(different) > 6 else ""
        raise ConfigError(
            f"{folder} holds a run of another configuration ({shown}{more}): give another name=..., "
            "or remove the folder"
        )


@contextmanager
def nothing_left_of_a_failed_start(folder: Path) -> Iterator[None]:
    """What cannot even start, such as a run whose shards are not there, leaves no folder that was not there before."""
    new = not folder.exists()
    if _is_first():
        _make(folder)
    try:
        yield
    except ConfigError:
        if new and _is_first():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def other_evaluation(folder: Path, plain: Mapping[str, Any]) -> str:
    """A line for who asks a finished run for an evaluation that is not the one it had; else nothing."""
    path = folder / "config.yaml"
    before = yaml.safe_load(path.read_text())["eval"] if path.exists() else plain["eval"]
    if configuration.flat(before) == configuration.flat(plain["eval"]):
        return ""
    return f"\nIt was evaluated with another eval: python scripts/evaluate.py run={folder} eval=... judges it again."


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the run's folder {folder} cannot be made ({error.strerror}): give another runs=..."
        ) from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"the run's folder {folder} cannot be written: give another runs=... or name=...")


def is_finished(folder: Path) -> bool:
    return (folder / "results.json").exists()


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def write_results(
    folder: Path,
    plain: Mapping[str, Any],
    experiment: str | None,
    overrides: list[str],
    training: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> None:
    """results.json: what was run, with what, and what came out. Written last; its presence says the run is finished."""
    content = {
        "experiment": experiment,
        "row": plain["row"],
        "overrides": overrides,
        "seed": plain["seed"],
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "revision": revision(),
        "training": dict(training),
        "protocol": protocol(plain["eval"], metrics),
        "metrics": dict(metrics),
    }
    write_whole(folder / "results.json", json.dumps(content, indent=1))


def summary(folder: Path) -> str:
    """What a finished run came to, for the terminal."""
    content = results(folder)
    lines = [f"{folder} is finished after {content['training']['steps']} steps; another name=... trains again."]
    lines += [f"  {key:<52} {value:8.2f}" for key, value in content["metrics"].items()]
    if (folder / "report.md").exists():
        lines.append(f"report: {folder / 'report.md'}")
    return "\n".join(lines)


def revision() -> str | None:
    """The git revision of the code, with "+" behind it when files differ from it; None outside a checkout."""
    where = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def write_whole(path: Path, text: str) -> None:
    """Replace a small file at once: a reader sees the old text or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def say(text: str) -> None:
    """A line to the terminal, from the first rank only."""
    if _is_first():
        print(text, file=sys.stderr, flush=True)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
