"""Trained models for other programs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from clipzoo.build import build_model
from clipzoo.errors import ConfigError
from clipzoo.evaluation.transform import Transform
from clipzoo.formats import open_clip as interchange
from clipzoo.formats.open_clip import to_open_clip
from clipzoo.model import Model
from clipzoo.runs.directory import config_of
from clipzoo.training import checkpoint


class LoadedModel(Model):
    """A trained model in evaluation mode.

    encode_image, encode_text: an embedding a row. similarity(image, text): [n, k] logits.
    transform: a PIL image -> uint8 [3, S, S], as zero-shot evaluation does it. tokenizer: captions -> [n, L] int64.
    """

    def __init__(self, model: Model, config: Mapping[str, Any]) -> None:
        super().__init__(model.encoder, model.head)
        self.config = config
        self.tokenizer = model.encoder.tokenizer
        size, shown = config["encoder"]["image_size"], config.get("eval", config["data"])
        self.transform = Transform(size, size, shown.get("interpolation", "bicubic"))


def load(path: str | Path, device: str | torch.device = "cpu") -> LoadedModel:
    """The model of a run's folder (its newest whole checkpoint) or of one checkpoint file inside a run.

    The run's config.yaml names the classes to build, which may be anyone's: load only runs that you trust.
    """
    path = Path(path)
    folder = path.parent.parent if path.suffix == ".pt" else path
    if not (folder / "config.yaml").exists():
        raise ConfigError(f"{path} is no run: there is no {folder / 'config.yaml'}")
    config = config_of(folder)
    if path == folder:
        found = checkpoint.load_newest(folder / "checkpoints")
        if found is None:
            raise ConfigError(f"{folder / 'checkpoints'} holds no whole checkpoint: train first")
        state = found[0]
    elif path.exists():
        state = checkpoint.read(path)
    else:
        raise ConfigError(f"{path} is not there: {path.parent} holds the run's checkpoints")
    model = build_model(config)
    model.load_state_dict(state["model"])
    return LoadedModel(model, config).to(device).eval()


def export(model: LoadedModel, folder: str | Path) -> None:
    """Write a CLIP-head model as an open_clip model: `open_clip.create_model("local-dir:FOLDER")` loads it."""
    to_open_clip(model, model.config, Path(folder))


def from_open_clip(name: str, pretrained: str | None = None, device: str | torch.device = "cpu") -> LoadedModel:
    """An open_clip model by name and tag, a checkpoint file as tag, or an exported folder as "local-dir:FOLDER"."""
    model, config = interchange.from_open_clip(name, pretrained)
    return LoadedModel(model, config).to(device).eval()
