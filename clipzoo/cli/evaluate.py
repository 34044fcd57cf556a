"""Evaluate a run, a checkpoint or an open_clip model.

clipzoo evaluate run=runs/demo eval=demo
clipzoo evaluate run=runs/demo/checkpoints/step_00001000.pt eval=demo eval.draws=5
clipzoo evaluate model=ViT-B-32 pretrained=laion2b_s34b_b79k eval=paper
torchrun --nproc-per-node 8 --no-python clipzoo evaluate run=runs/demo eval=paper
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from clipzoo import io
from clipzoo.config.compose import compose
from clipzoo.config.groups import CONF
from clipzoo.config.suggestions import nearest
from clipzoo.errors import ConfigError
from clipzoo.runs import directory as run
from clipzoo.runs.directory import config_of
from clipzoo.runs.metric_key import parsed
from clipzoo.runs.record import RunRecord, write_results

# Until open_clip's model is loaded and says what it is like.
_PLACEHOLDERS = {
    "image_size": 224,
    "tokenizer": {"_target_": "clipzoo.data.tokenizer.ClipTokenizer", "context_length": 77},
}


def main(arguments: list[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
    else:
        evaluate(arguments)


def evaluate(overrides: list[str]) -> dict[str, float]:
    """Evaluate what `run=` or `model=` names on the sets of `eval=`; results and report are brought up to date."""
    asked = _asked(overrides)
    facts = _facts(_stored(asked["run"])) if asked["run"] else None
    # Before torch is imported: a mistyped key is named at once.
    plain = _composed(overrides, facts or _PLACEHOLDERS)
    from clipzoo.build import part
    from clipzoo.distributed.world import World

    world = World.join(asked["device"], plain["timeout"], key="device")
    try:
        model = _loaded(asked)
        if facts is None:
            plain = _composed(overrides, _facts(model.config))
        suite = part(plain["eval"])
        suite.open()
        folder = _folder(plain)
        metrics = suite.run(model.to(world.device), folder / "evaluation", world)
        world.run_on_first(lambda: _write(folder, plain, overrides, metrics))
    finally:
        world.leave()
    return metrics


def _facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the suite must know of a model's encoder."""
    return {key: config["encoder"][key] for key in ("image_size", "tokenizer")}


def _composed(overrides: list[str], facts: Mapping[str, Any]) -> dict[str, Any]:
    return compose([*overrides, _override("+encoder", facts)], "eval")


def _asked(overrides: list[str]) -> dict[str, Any]:
    """The values of eval.yaml's own keys, before its groups can be resolved."""
    given = OmegaConf.from_dotlist([each for each in overrides if not each.startswith(("eval=", "eval.", "+", "~"))])
    defaults = yaml.safe_load((CONF / "eval.yaml").read_text())
    asked = {key: given.get(key, default) for key, default in defaults.items() if key != "defaults"}
    if (asked["run"] is None) == (asked["model"] is None):
        raise ConfigError("give one of run=FOLDER, run=CHECKPOINT and model=OPEN_CLIP_NAME")
    if asked["row"] is not None:
        _check_row(asked["row"], asked["run"])
    return asked


def _check_row(row: str, run: str | None) -> None:
    from clipzoo.report.paper_tables.published import row_names

    if run is not None:
        raise ConfigError(f"row={row} goes with model=: a run has a row of its own")
    if row not in row_names():
        raise ConfigError(f"no paper has the row {row}{nearest(row, row_names())}")


def _stored(path: str) -> dict[str, Any]:
    """The configuration of a run or of a checkpoint inside one."""
    folder = _run_folder(Path(path))
    if not (folder / "config.yaml").exists():
        raise ConfigError(f"run={path} is no run: there is no {folder / 'config.yaml'}")
    if not Path(path).exists():
        raise ConfigError(f"run={path} is not there: {folder / 'checkpoints'} holds the run's checkpoints")
    return config_of(folder)


def _loaded(asked: Mapping[str, Any]) -> Any:
    from clipzoo import api as library

    if asked["run"] is not None:
        return library.load(asked["run"])
    return library.from_open_clip(asked["model"], asked["pretrained"])


def _folder(plain: Mapping[str, Any]) -> Path:
    if plain["output"] is not None:
        return Path(plain["output"])
    if plain["run"] is not None:
        path = Path(plain["run"])
        # What one checkpoint comes to is no result of the run.
        return _run_folder(path) / path.stem if path.suffix == ".pt" else path
    parts = [plain["model"], plain["pretrained"] and Path(plain["pretrained"]).stem]
    return Path("runs") / "-".join(part.replace("/", "-").replace(":", "-") for part in parts if part)


def _run_folder(path: Path) -> Path:
    """Of a run, or of a checkpoint in <run>/checkpoints/."""
    return path.parent.parent if path.suffix == ".pt" else path


def _write(folder: Path, plain: Mapping[str, Any], overrides: list[str], metrics: Mapping[str, float]) -> None:
    """Bring results.json up to date; one is made only for what is no run: it says that a training is finished."""
    import json

    from clipzoo.report.run_page.page import write_report

    if run.is_finished(folder):
        RunRecord.read(folder).evaluated(plain["eval"], parsed(metrics)).write(folder)
    elif not (folder / "config.yaml").exists():
        row = plain["row"] if plain["run"] is None else _stored(plain["run"])["row"]
        facts = {"row": row, "seed": plain["eval"]["seed"], "eval": plain["eval"]}
        write_results(folder, facts, None, overrides, {"steps": 0}, metrics)
    io.write_whole(folder / "evaluation" / "metrics.json", json.dumps(metrics, indent=1))
    run.say(f"report: {write_report(folder)}")


def _override(key: str, value: Any) -> str:
    """A nested value in the grammar of Hydra's command line."""
    return f"{key}={_written(value)}"


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_written(inner) for inner in value) + "]"
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
