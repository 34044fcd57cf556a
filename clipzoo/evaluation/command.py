"""What scripts/evaluate.py does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from clipzoo import config as configuration
from clipzoo import distributed, run
from clipzoo.errors import ConfigError


def evaluate(overrides: list[str]) -> dict[str, float]:
    """Evaluate what `run=` or `model=` names on the sets of `eval=`; results and report are brought up to date."""
    asked = _asked(overrides)
    encoder = _stored_encoder(asked["run"]) if asked["run"] else None
    if encoder is not None:
        # Before torch is imported: a mistyped key is named at once.
        plain = configuration.resolved(configuration.composed([*overrides, _override("+encoder", encoder)], "eval"))
    from clipzoo.build import part

    device = _device(asked["device"])
    model = _loaded(asked)
    if encoder is None:
        facts = {key: model.config["encoder"][key] for key in ("image_size", "tokenizer")}
        plain = configuration.resolved(configuration.composed([*overrides, _override("+encoder", facts)], "eval"))
    suite = part(plain["eval"])
    suite.open()
    distributed.start(device, plain["timeout"])
    try:
        folder = _folder(plain)
        metrics = suite.run(model.to(device), folder / "evaluation")
        distributed.first_rank_does(lambda: _write(folder, plain, overrides, metrics))
    finally:
        distributed.stop()
    return metrics


def _asked(overrides: list[str]) -> dict[str, Any]:
    """The values of eval.yaml's own keys, before its groups can be resolved."""
    given = OmegaConf.from_dotlist([each for each in overrides if not each.startswith(("eval=", "eval.", "+", "~"))])
    defaults = yaml.safe_load((configuration.CONF / "eval.yaml").read_text())
    asked = {key: given.get(key, default) for key, default in defaults.items() if key != "defaults"}
    if (asked["run"] is None) == (asked["model"] is None):
        raise ConfigError("give one of run=FOLDER, run=CHECKPOINT and model=OPEN_CLIP_NAME")
    return asked


def _stored_encoder(path: str) -> dict[str, Any]:
    folder = _run_folder(Path(path))
    if not (folder / "config.yaml").exists():
        raise ConfigError(f"run={path} is no run: there is no {folder / 'config.yaml'}")
    encoder = yaml.safe_load((folder / "config.yaml").read_text())["encoder"]
    return {key: encoder[key] for key in ("image_size", "tokenizer")}


def _loaded(asked: Mapping[str, Any]) -> Any:
    from clipzoo import library

    if asked["run"] is not None:
        return library.load(asked["run"])
    return library.from_open_clip(asked["model"], asked["pretrained"])


def _folder(plain: Mapping[str, Any]) -> Path:
    if plain["output"] is not None:
        return Path(plain["output"])
    if plain["run"] is not None:
        return _run_folder(Path(plain["run"]))
    parts = [plain["model"], plain["pretrained"] and Path(plain["pretrained"]).stem]
    return Path("runs") / "-".join(part.replace("/", "-").replace(":", "-") for part in parts if part)


def _run_folder(path: Path) -> Path:
    """Of a run, or of a checkpoint in <run>/checkpoints/."""
    return path.parent.parent if path.suffix == ".pt" else path


def _write(folder: Path, plain: Mapping[str, Any], overrides: list[str], metrics: Mapping[str, float]) -> None:
    """Bring results.json up to date; one is made only for what is no run: it says that a training is finished."""
    import json

    from clipzoo.report.run import write_report

    if run.is_finished(folder):
        content = run.results(folder)
        content["metrics"] |= metrics
        run.write_whole(folder / "results.json", json.dumps(content, indent=1))
    elif not (folder / "config.yaml").exists():
        run.write_results(folder, {"row": None, "seed": plain["eval"]["seed"]}, None, overrides, {"steps": 0}, metrics)
    run.write_whole(folder / "evaluation" / "metrics.json", json.dumps(metrics, indent=1))
    run.say(f"report: {write_report(folder)}")


def _device(name: str) -> Any:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no CUDA device: use device=auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


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
