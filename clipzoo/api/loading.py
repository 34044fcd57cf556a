"""Load trained models of this package, of open_clip and of transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from clipzoo.api import open_clip, published, transformers
from clipzoo.api.build import build_trained
from clipzoo.config.trust import require_trusted
from clipzoo.config.variables import RESOLVER
from clipzoo.encoders.tuning.lora import merged
from clipzoo.errors import ConfigError, cause
from clipzoo.evaluation.transform import Transform
from clipzoo.io import DamagedFileError
from clipzoo.io.weights import run_of
from clipzoo.model import Model
from clipzoo.objectives.siglip import SigLIP
from clipzoo.runs.directory import config_of
from clipzoo.runs.metric_key import AVERAGE
from clipzoo.runs.remote import local_copy
from clipzoo.runs.variables import uses_variables, with_variables
from clipzoo.training import checkpoint_files
from clipzoo.training.tuned import read_frozen
from clipzoo.types import Embedding, as_captions

PAIR = "pair"


class LoadedModel(Model):
    """A trained model in evaluation mode.

    encode_image, encode_text: one embedding for each row. similarity(image, text): [n, k] logits.
    transform: PIL image or path -> uint8 [3, S, S], as in zero-shot evaluation.
    tokenizer: one caption or several -> [n, L] int64.
    config["pair"]: scale and bias of SigLIP's objective, see `pair_logits`.
    """

    def __init__(
        self, model: Model, config: Mapping[str, Any], folder: Path | None = None, averaged: bool = False
    ) -> None:
        """config: encoder, head and more. folder: the run directory that the model comes from, for its record.

        averaged: the weights are the average of the run's.
        """
        super().__init__(model.encoder, model.head)
        self.config = config
        self.folder = folder
        self.averaged = averaged
        self.tokenizer = model.encoder.tokenizer
        encoder, evaluation = config["encoder"], config.get("eval", config["data"])
        size, interpolation = encoder["image_size"], evaluation.get("interpolation", "bicubic")
        mode: Any = evaluation.get("resize_mode") or encoder.get("resize_mode") or "shortest"
        self.transform = Transform(size, size, interpolation, mode)

    def encode_image(self, image: Tensor | Image | str | Path | Sequence[Image | str | Path]) -> Embedding:
        """uint8 [b, 3, H, W], a PIL image, a path, or several of these -> embeddings, one row per image.

        Raises:
            ConfigError: other values, such as an image [3, H, W] without the dimension of the batch.
        """
        if not isinstance(image, Tensor):
            images = [image] if isinstance(image, Image | str | Path) else image
            image = torch.stack([self.transform(one) for one in images])
        if image.ndim != 4:
            raise ConfigError(
                f"encode_image takes uint8 [b, 3, H, W], PIL images or paths, not {list(image.shape)}: give "
                "model.transform(picture).unsqueeze(0)"
            )
        return super().encode_image(image)

    def encode_text(self, text: Tensor | str | Sequence[str]) -> Embedding:
        """Token ids int64 [b, L], one caption or several -> embeddings, one row per caption.

        Raises:
            ConfigError: other values, such as ids [L] without the dimension of the batch.
        """
        if not isinstance(text, Tensor):
            text = self.tokenizer(as_captions(text))
        if text.ndim != 2:
            raise ConfigError(
                f"encode_text takes captions, or token ids [b, L] as model.tokenizer(captions) returns them, not "
                f"{list(text.shape)}"
            )
        return super().encode_text(text)

    def pair_logits(self, image: Embedding, text: Embedding) -> Tensor:
        """n image and k text embeddings -> [n, k] logits of the probability that an image and a caption form a pair.

        For models of SigLIP: exp(log_scale) similarity + bias, with the scale and the bias that the objective learned.
        Equals `similarity` for models of other objectives.
        """
        logits = self.similarity(image, text)
        pair = self.config.get(PAIR)
        return logits if pair is None else math.exp(pair["log_scale"]) * logits + pair["bias"]


def load(
    path: str | Path, device: str | torch.device = "cpu", trust: str | Sequence[str] = (), average: bool = False
) -> LoadedModel:
    """Load a trained model.

    path: a run directory (its newest valid checkpoint), one checkpoint of a run, the URL of one of these in a store
        ("s3://bucket/runs/demo", as text), a directory that
        `clipzoo.export(..., to="hub")` wrote, or "hf-hub:USER/NAME" for one on the Hugging Face hub.
    average: load the averaged weights of a run that was trained with `average=...`.

    The configuration may name parts of this package, and classes of the packages in `trust`: "mypackage".
    trust="oc.env" resolves its environment variables, ${oc.env:NAME}.

    Raises:
        ConfigError: there is no such run or checkpoint, its config.yaml names another class, or it has no average.
    """
    trust = (trust,) if isinstance(trust, str) else trust
    if str(path).startswith(published.HUB):
        path = published.downloaded(str(path))
    path = local_copy(str(path), "path")
    if published.is_published(path):
        if average:
            raise ConfigError(f"{path} holds one model and no average: export that of a run")
        config, weights = published.read_published(path, trust)
        dtype = next((value.dtype for value in weights.values()), None)
        model = build_trained(config, weights, path / published.WEIGHTS, published.REMEDY, trust, dtype)
        return LoadedModel(model, config).to(device).eval()
    folder = run_of(path)
    if not (folder / "config.yaml").exists():
        raise ConfigError(f"{path} is not a run: there is no {folder / 'config.yaml'}")
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
        newest = checkpoint_files.newest(folder / "checkpoints")
        if newest is None:
            raise ConfigError(f"{folder / 'checkpoints'} holds no valid checkpoint: train first")
        state = checkpoint_files.read(newest, without=("optimizer",), verified=True, mapped=True)
    elif path.exists():
        state = checkpoint_files.read(path, "model", without=("optimizer",), mapped=True)
    else:
        raise ConfigError(f"there is no checkpoint {path}: {path.parent} holds those of the run")
    if average:
        state = _with_average(state, path)
    trained = state["model"] if isinstance(state["model"], Mapping) else {}
    weights = {**read_frozen(folder, state), **trained}
    try:
        merged({name: value.to("meta") for name, value in weights.items()})
    except (KeyError, RuntimeError, AttributeError, TypeError) as error:
        raise DamagedFileError(path, f"has no weights of a model ({cause(error)})", checkpoint_files.REMEDY) from None
    model = build_trained(config, merged(weights), path, checkpoint_files.REMEDY, trust)
    return LoadedModel(model, _with_pair(config, state), folder, average).to(device).eval()


def _with_average(state: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return a checkpoint with its average in place of the weights of model and objective."""
    average = state.get(AVERAGE)
    if average is None:
        raise ConfigError(f"{path} has no averaged weights: its run was trained without average=ema or average=swa")
    if not average["has_begun"]:
        raise ConfigError(f"{path} has no averaged weights yet: it was saved before the first averaged step")
    return {**state, **{part: {**state[part], **average[part]} for part in ("model", "objective")}}


def _with_pair(config: dict[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's configuration with the scale and the bias of an objective that classifies pairs."""
    target, learned = config.get("objective", {}).get("_target_", ""), state.get("objective")
    if target.rpartition(".")[2] != SigLIP.__name__ or not isinstance(learned, Mapping):
        return config
    log_scale, bias = SigLIP.pair(learned)
    return {**config, PAIR: {"log_scale": log_scale, "bias": bias}}


def from_open_clip(name: str, pretrained: str | None = None, device: str | torch.device = "cpu") -> LoadedModel:
    """Return an open_clip model by name and tag, a checkpoint file as tag, or an exported folder "local-dir:FOLDER"."""
    model, config = open_clip.from_open_clip(name, pretrained)
    return LoadedModel(model, config).to(device).eval()


def from_transformers(folder: str | Path, device: str | torch.device = "cpu") -> LoadedModel:
    """Return the CLIPModel of transformers in a folder: config.json, model.safetensors and its preprocessing."""
    model, config = transformers.from_transformers(Path(folder))
    return LoadedModel(model, config).to(device).eval()
