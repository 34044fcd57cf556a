"""The results of a run: results.json, written last, and what the terminal shows of it. Needs no torch."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from clipzoo.io import write_whole
from clipzoo.runs.metric_key import parsed
from clipzoo.runs.protocol import protocol

PACKAGES = ("torch", "torchvision", "open_clip_torch", "timm", "webdataset", "numpy")


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
        "protocol": protocol(plain["eval"], parsed(metrics)),
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


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
