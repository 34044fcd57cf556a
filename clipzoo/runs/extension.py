"""A finished run that continues to more epochs or steps. Its results until then are kept beside it. Needs no torch.

    runs/x/ended_at_step_00001000/      config.yaml, results.json, report, evaluation and checkpoint of the shorter run

The folder is a run directory of its own: it is evaluated, loaded and compared like any other. The schedules of the
longer run are those of its whole length: they do not restart.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clipzoo import io
from clipzoo.errors import ConfigError
from clipzoo.io.weights import checkpoints_in, mark_of, step_of
from clipzoo.runs.identity import differing, digest, identity
from clipzoo.runs.record import ENDED, FILE, RunRecord

LENGTH = ("trainer.epochs", "trainer.steps")
KEPT = (
    "config.yaml", "dataset.json", "captions.json", "metrics.jsonl", "report.md", "report.html", "report", "evaluation",
    "results.json",
)  # fmt: skip
"""Files and folders of the shorter run that are copied. The last one marks the copy as finished."""
BESIDE = ("metrics.jsonl", "frozen.pt", "frozen.json")
"""Files of a run that it needs to resume; the logger removes later lines from metrics.jsonl."""


def is_longer(stored: Mapping[str, Any], plain: Mapping[str, Any]) -> bool:
    """Return True if a configuration differs from the stored one in its length alone, and asks for more."""
    before, now = identity(stored), identity(plain)
    different = differing(before, now)
    return len(different) == 1 and different[0] in LENGTH and _is_more(before[different[0]], now[different[0]])


def refusal(folder: Path, stored: Mapping[str, Any], plain: Mapping[str, Any]) -> str | None:
    """Return why the run of a directory cannot go on to more steps, and the remedy; None if it can.

    stored: configuration of the directory. plain: that of the longer run; values that are found in the model may be
    open in it.
    """
    if "CLIPZOO_SWEEP" in os.environ:
        return "the points of a sweep would share its directory: give no name=..."
    # Without results.json, a command that continues was interrupted after it had kept them.
    if not (folder / FILE).exists() and kept_results(folder, stored) is None:
        return "only a finished run continues: finish it with its own length first, or give another name=..."
    length = {key: stored["trainer"].get(key) for key in ("epochs", "steps")}
    shorter = {**plain, "trainer": {**plain["trainer"], **length}}
    if folder.name.endswith((f"-{digest(stored)}", f"-{digest(shorter)}")):
        return (
            f"its name is the digest of its settings: continue in a copy (cp -r {folder} {folder.parent}/NEW, name=NEW)"
        )
    return None


def keep_results(folder: Path) -> Path | None:
    """Copy the results of a finished run, with its last checkpoint, to <folder>/ended_at_step_<steps>.

    The run is then no longer finished. Returns the copy; None if an interrupted command has made it already.

    Raises:
        ConfigError: the run has no checkpoint of its last step.
    """
    if not (folder / FILE).exists():
        return None
    steps = int(RunRecord.read(folder).training.get("steps", -1))
    checkpoint = next((one for one in checkpoints_in(folder / "checkpoints") if step_of(one) == steps), None)
    if checkpoint is None:
        last = folder / "checkpoints" / f"step_{steps:08d}.pt"
        raise ConfigError(f"{folder} cannot continue: its last checkpoint {last} does not exist")
    kept = folder / f"{ENDED}{steps:08d}"
    shutil.rmtree(kept, ignore_errors=True)
    with io.new_folder(kept) as new:
        link_checkpoint(checkpoint, new / "checkpoints")
        for name in KEPT:
            _copy(folder / name, new / name)
    with io.explained(kept):
        (folder / "dataset.json").unlink(missing_ok=True)  # has the digest of the shorter run; written again
        (folder / FILE).unlink()
    return kept


def copy_start(run: Path, checkpoint: Path, folder: Path) -> None:
    """Copy a checkpoint of a run to the directory of another one, with the files that a resumed run needs beside it."""
    with io.explained(folder):
        for name in BESIDE:
            _copy(run / name, folder / name)
        link_checkpoint(checkpoint, folder / "checkpoints")


def link_checkpoint(checkpoint: Path, folder: Path) -> None:
    """Give a checkpoint a second place, its mark last. An incomplete copy is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (checkpoint, mark_of(checkpoint)):
        target = folder / file.name
        if target.is_dir():
            shutil.rmtree(target)
        target.unlink(missing_ok=True)
        _link(file, target)


def kept_results(folder: Path, plain: Mapping[str, Any]) -> Path | None:
    """Return the folder with the results that the run had with an earlier length, None if it never had this one."""
    own = identity(plain)
    configurations = folder.glob(f"{ENDED}*/config.yaml")
    return next((path.parent for path in configurations if not differing(identity(io.read_yaml(path)), own)), None)


def length_hint(plain: Mapping[str, Any]) -> str:
    """Hint shown when a finished run is requested; empty for a run without a name, which a new length renames."""
    return "\nIt continues with a larger trainer.epochs or trainer.steps." if plain["name"] else ""


def _is_more(before: object, now: object) -> bool:
    return isinstance(before, int | float) and isinstance(now, int | float) and now > before


def _link(file: Path, target: Path) -> None:
    """Give a checkpoint a second name, which costs no space; copy it where the file system cannot."""
    if file.is_dir():
        target.mkdir()
        for shard in file.iterdir():
            _link(shard, target / shard.name)
        return
    try:
        os.link(file, target)
    except OSError:
        _copy(file, target)


def _copy(source: Path, target: Path) -> None:
    """Copy a file or a folder, each file completely or not at all."""
    if source.is_dir():
        shutil.copytree(source, target, copy_function=lambda file, copy: _copy(Path(file), Path(copy)))
    elif source.exists():
        with io.readable(source, io.ANY_SIZE) as content, io.whole(target) as file:
            shutil.copyfileobj(content, file)
