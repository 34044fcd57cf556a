"""The library: train a model, load a trained one, exchange models with open_clip."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from clipzoo.build import build_model
from clipzoo.config.trust import require_trusted
from clipzoo.config.variables import RESOLVER, uses_variables, with_variables
from clipzoo.contracts import Dataset, Optimizer
from clipzoo.distributed.device import choose_device
from clipzoo.distributed.environment import say
from clipzoo.distributed.preemption import Preemption
from clipzoo.distributed.watchdog import Watchdog
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.evaluation.transform import Transform
from clipzoo.formats import open_clip
from clipzoo.model import Model
from clipzoo.objectives import compatibility
from clipzoo.objectives.base import Objective
from clipzoo.runs.directory import config_of
from clipzoo.training import checkpoint
from clipzoo.training.callback import CallbackEvaluator, HistoryLogger
from clipzoo.training.loggers import Logger
from clipzoo.training.optimizers import AdamW
from clipzoo.training.parts import Parts
from clipzoo.training.schedules import Cosine
from clipzoo.training.settings import Computation, Length, Saving
from clipzoo.training.trainer import fit


@dataclass(frozen=True)
class TrainingResult:
    """model: trained, in evaluation mode. metrics: of the last evaluation. cost: seconds, samples per second, memory.

    history: the logged values of steps and evaluations, each with its "step".
    """

    model: Model
    metrics: Mapping[str, float]
    cost: Mapping[str, Any]
    history: list[dict[str, Any]]


def train(
    model: Model,
    objective: Objective,
    dataset: Dataset,
    *,
    batch: int,
    epochs: float | None = None,
    steps: int | None = None,
    learning_rate: float = 5e-4,
    optimizer: Optimizer | None = None,
    evaluate: Callable[[Model], Mapping[str, float]] | None = None,
    evaluate_every: float | None = 1.0,
    computation: Computation | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    world: World | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    log_every: int = 10,
    save_every: int = 500,
    quiet: bool = False,
) -> TrainingResult:
    """Train a model in place, as `train.py` does.

    batch: samples of a step, over all ranks. epochs or steps: the length; the other is None.
    learning_rate: peak of AdamW's cosine schedule without warmup; `optimizer` replaces both.
    evaluate: called with the model every `evaluate_every` epochs and at the end; returns metrics by name.
    computation: precision, micro-batches, gradient clipping; None for fp32 without them.
    world: `World.join(...)` for several ranks; None for a single process on `device`. seed: of all randomness.
    folder: run directory for checkpoints and metrics.jsonl; the same call resumes from it. None: nothing is written.
    log_every, save_every: steps. quiet: print no progress.

    Raises:
        ConfigError: the parts cannot be trained together, or not in this length.
        TrainingError: the loss diverged.
    """
    compatibility.require(model.head, objective)
    world = world or World(device=choose_device(device, "device"))
    length = Length(batch, epochs, steps)
    folder = None if folder is None else Path(folder)
    dataset.open(folder, world)
    dataset.check(seed, batch)
    length.check(dataset.samples, world)
    logger = HistoryLogger(Logger("off", "clipzoo", None, None, tensorboard=False))
    parts = Parts(
        model=model,
        objective=objective,
        dataset=dataset,
        optimizer=optimizer or adam(learning_rate),
        evaluator=CallbackEvaluator(evaluate, evaluate_every),
        logger=logger,
        seed=seed,
        folder=folder,
        report=_ignore if quiet else say,
    )
    # A program's own signal handlers stay as they are.
    preemption = Preemption(Watchdog(), signals=())
    cost, metrics = fit(parts, length, computation or Computation(), Saving(log_every, save_every), world, preemption)
    logger.close()
    return TrainingResult(model.eval(), metrics, cost, logger.history)


def adam(learning_rate: float, final_learning_rate: float = 0.0) -> AdamW:
    """Return Adam without weight decay, its learning rate falling along half a cosine."""
    schedule = Cosine(
        peak=learning_rate, start=learning_rate, end=final_learning_rate, warmup_epochs=None, warmup_steps=0,
        restart_epochs=None, per_epoch=False,
    )  # fmt: skip
    return AdamW(betas=[0.9, 0.999], eps=1e-8, weight_decay=0.0, schedule=schedule)


def _ignore(line: str) -> None:
    pass


class LoadedModel(Model):
    """A trained model in evaluation mode.

    encode_image, encode_text: one embedding for each row. similarity(image, text): [n, k] logits.
    transform: PIL image -> uint8 [3, S, S], as in zero-shot evaluation. tokenizer: captions -> [n, L] int64.
    """

    def __init__(self, model: Model, config: Mapping[str, Any]) -> None:
        super().__init__(model.encoder, model.head)
        self.config = config
        self.tokenizer = model.encoder.tokenizer
        size, evaluation = config["encoder"]["image_size"], config.get("eval", config["data"])
        self.transform = Transform(size, size, evaluation.get("interpolation", "bicubic"))


def load(path: str | Path, device: str | torch.device = "cpu", trust: str | Sequence[str] = ()) -> LoadedModel:
    """Load the model of a run directory (its newest valid checkpoint) or of one checkpoint file inside a run.

    The run's config.yaml may name parts of this package, and classes of the packages in `trust`: "mypackage".
    trust="oc.env" resolves its environment variables, ${oc.env:NAME}.

    Raises:
        ConfigError: there is no such run or checkpoint, or its config.yaml names another class.
    """
    trust = (trust,) if isinstance(trust, str) else trust
    path = Path(path)
    folder = path.parent.parent if path.suffix == ".pt" else path
    if not (folder / "config.yaml").exists():
        raise ConfigError(f"{path} is no run: there is no {folder / 'config.yaml'}")
    config = config_of(folder)
    nodes = {part: config[part] for part in ("encoder", "head")}
    require_trusted(nodes, trust)
    if uses_variables(nodes):
        if RESOLVER not in trust:
            raise ConfigError(
                f"{folder / 'config.yaml'} asks for the values of environment variables: add trust={RESOLVER} if you "
                "trust this run"
            )
        config |= with_variables(nodes)
    if path == folder:
        newest = checkpoint.load_newest(folder / "checkpoints")
        if newest is None:
            raise ConfigError(f"{folder / 'checkpoints'} holds no valid checkpoint: train first")
        state = newest[0]
    elif path.exists():
        state = checkpoint.read(path, "model")
    else:
        raise ConfigError(f"there is no checkpoint {path}: {path.parent} holds those of the run")
    model = build_model(config, trust=trust)
    model.load_state_dict(state["model"])
    return LoadedModel(model, config).to(device).eval()


def export(model: LoadedModel, folder: str | Path) -> None:
    """Write a CLIP-head model as an open_clip model: `open_clip.create_model("local-dir:FOLDER")` loads it."""
    open_clip.to_open_clip(model, model.config, Path(folder))


def from_open_clip(name: str, pretrained: str | None = None, device: str | torch.device = "cpu") -> LoadedModel:
    """Return an open_clip model by name and tag, a checkpoint file as tag, or an exported folder "local-dir:FOLDER"."""
    model, config = open_clip.from_open_clip(name, pretrained)
    return LoadedModel(model, config).to(device).eval()
