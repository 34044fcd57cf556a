"""Load trained models: runs, checkpoints and exported models."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from clipzoo import io
from clipzoo.build import build_trained, part_class
from clipzoo.config.compose import RESOLVER
from clipzoo.config.trust import require_trusted, values_of
from clipzoo.encoders.tuning import merged
from clipzoo.errors import ConfigError, cause, number_of
from clipzoo.evaluation.encoder import BatchEncoder, Precision, Transform
from clipzoo.evaluation.mteb import MtebEncoder
from clipzoo.evaluation.suite import model_key
from clipzoo.io import DamagedFileError
from clipzoo.io.weights import read_tensors, run_of
from clipzoo.model import Model
from clipzoo.runs.directory import config_of
from clipzoo.runs.identity import uses_variables, with_variables
from clipzoo.runs.record import AVERAGE
from clipzoo.training import checkpoint_files
from clipzoo.training.tuned import read_frozen
from clipzoo.types import Embedding, as_captions

CONFIG, WEIGHTS = "clipzoo.json", "model.safetensors"
HUB = "hf-hub:"
VERSION = 1
REMEDY = "export the model again"
FIELDS = {"version": int, "encoder": dict, "head": dict, "interpolation": str}
TOKENIZER_IN_FOLDER = "."
"""Name of a tokenizer whose files are in the model's directory."""
OUTSIDE_PREFIXES = ("/", "~", "\\", "local-dir:", HUB)
"""Prefixes of values that name files outside the model's directory."""
PAIR = "pair"


class LoadedModel(Model):
    """A trained model in evaluation mode.

    encode_image, encode_text: one embedding for each row. similarity(image, text): [n, k] logits.
    transform: PIL image or path -> uint8 [3, S, S], as in zero-shot evaluation.
    tokenizer: one caption or several -> [n, L] int64.
    config["pair"]: scale and bias of SigLIP's objective, see `pair_logits`.
    stored_dtype: precision of the weights in their file; that of `dtype` may be higher.
    """

    def __init__(
        self, model: Model, config: Mapping[str, Any], folder: Path | None = None, averaged: bool = False
    ) -> None:
        """config: of encoder, head and data. folder: the run directory. averaged: the weights are the run's average."""
        super().__init__(model.encoder, model.head)
        self.config = config
        self.folder = folder
        self.averaged = averaged
        self.stored_dtype = self.dtype
        self.tokenizer = model.encoder.tokenizer
        encoder, evaluation = config["encoder"], config.get("eval", config["data"])
        size, interpolation = encoder["image_size"], evaluation.get("interpolation", "bicubic")
        mode: Any = evaluation.get("resize_mode") or encoder.get("resize_mode") or "shortest"
        self.transform = Transform(size, size, interpolation, mode)

    def encode_image(self, image: Tensor | Image | str | Path | Sequence[Image | str | Path]) -> Embedding:
        """uint8 [b, 3, H, W], a PIL image, a path, or several of these -> embeddings, one row per image."""
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
        """Token ids int64 [b, L], one caption or several -> embeddings, one row per caption."""
        if not isinstance(text, Tensor):
            text = self.tokenizer(as_captions(text))
        if text.ndim != 2:
            raise ConfigError(
                f"encode_text takes captions, or token ids [b, L] as model.tokenizer(captions) returns them, not "
                f"{list(text.shape)}"
            )
        return super().encode_text(text)

    @property
    def pair_scale(self) -> float:
        return math.exp(self.config[PAIR]["log_scale"]) if PAIR in self.config else 1.0

    def pair_logits(self, image: Embedding, text: Embedding) -> Tensor:
        """n image and k text embeddings -> [n, k] logits of the probability that an image and a caption form a pair.

        With the learned scale and bias of SigLIP: exp(log_scale) * similarity + bias. Else equal to `similarity`.
        """
        logits = self.similarity(image, text)
        pair = self.config.get(PAIR)
        return logits if pair is None else self.pair_scale * logits + pair["bias"]


def mteb(model: LoadedModel, batch_size: int = 256, workers: int = 2, precision: Precision = "float32") -> MtebEncoder:
    """Return a model as an encoder of mteb: `mteb.evaluate(clipzoo.mteb(model), mteb.get_task("CIFAR10ZeroShot"))`.

    Images are resized as by `model.transform`; other arguments as in `eval`. Raises ConfigError without mteb.
    """
    tokenizer: Any = model.tokenizer
    transform, name = model.transform, model.folder or Path("model")
    settings = transform.interpolation, batch_size, workers, precision, transform.resize_mode
    encoder = BatchEncoder(tokenizer, model.config["encoder"]["image_size"], *settings)
    return MtebEncoder(model, encoder, f"clipzoo/{name.name}", model_key(model, settings))


def load_run(path: Path, trust: Collection[str] = (), average: bool = False) -> LoadedModel:
    """Return the model of a run, or of one of its checkpoints; average: its averaged weights. Raises ConfigError."""
    folder = run_of(path)
    if not (folder / "config.yaml").exists():
        raise ConfigError(f"{path} is not a run: there is no {folder / 'config.yaml'}, nor an exported model")
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
        if (newest := checkpoint_files.newest(folder / "checkpoints")) is None:
            raise ConfigError(f"{folder / 'checkpoints'} holds no valid checkpoint: train first")
        state = checkpoint_files.read(newest, without=("optimizer",), verified=True, mapped=True)
    elif path.exists():
        state = checkpoint_files.read(path, "model", without=("optimizer",), mapped=True)
    else:
        raise ConfigError(f"there is no checkpoint {path}: {path.parent} holds those of the run")
    if average:
        if (averaged := state.get(AVERAGE)) is None:
            raise ConfigError(f"{path} has no averaged weights: its run was trained without average=ema or average=swa")
        if not averaged["has_begun"]:
            raise ConfigError(f"{path} has no averaged weights yet: it was saved before the first averaged step")
        state = {**state, **{part: {**state[part], **averaged[part]} for part in ("model", "objective")}}
    trained = state["model"] if isinstance(state["model"], Mapping) else {}
    weights = {**read_frozen(folder, state), **trained}
    try:
        merged({name: value.to("meta") for name, value in weights.items()})
    except (KeyError, RuntimeError, AttributeError, TypeError) as error:
        raise DamagedFileError(path, f"has no weights of a model ({cause(error)})", checkpoint_files.REMEDY) from None
    model = build_trained(config, merged(weights), path, checkpoint_files.REMEDY, trust)
    if isinstance(learned := state.get("objective"), Mapping):
        # A class of another package is imported only if the user trusts it.
        with suppress(ConfigError, AttributeError):
            pair = part_class(config.get("objective", {}).get("_target_", ""), trust).pair(learned)
            config |= {} if pair is None else {PAIR: {"log_scale": pair[0], "bias": pair[1]}}
    return LoadedModel(model, config, folder, average)


# WiSE-FT: interpolate the weights of a model before and after fine-tuning (Wortsman et al. 2022).


def interpolate(first: LoadedModel, second: LoadedModel, mix: float) -> LoadedModel:
    """Return the model with weights (1 - mix) first + mix second; mix 0 is the first model, 1 the second, exactly.

    Integer tensors, such as counts, are those of the second. Raises ConfigError if the models have different tensors.
    """
    start, end = first.state_dict(), second.state_dict()
    shapes = [{name: tuple(value.shape) for name, value in state.items()} for state in (start, end)]
    if shapes[0] != shapes[1]:
        names = sorted(name for name in {*start, *end} if shapes[0].get(name) != shapes[1].get(name))
        raise ConfigError(
            f"models cannot be mixed: {number_of(len(names), 'tensor')} have other shapes, the first is {names[0]}"
        )
    mixed = copy.deepcopy(second)
    with torch.no_grad():
        for name, value in mixed.state_dict().items():
            if value.is_floating_point() and mix != 1:
                value.copy_(start[name] if mix == 0 else torch.lerp(start[name], end[name], mix))
    return mixed


# Published models: directories with clipzoo.json and model.safetensors. Their content is never executed.


def load_published(folder: Path, trust: Collection[str] = ()) -> LoadedModel:
    """Return the model of a clipzoo.json; ConfigError for code, untrusted classes, outside files or pickles."""
    path = folder / CONFIG
    require_data_only(folder)
    content = io.read_json(path, io.MB, REMEDY, fields=FIELDS)
    if content["version"] > VERSION:
        raise ConfigError(f"{path} has version {content['version']}, this clipzoo reads up to {VERSION}: upgrade it")
    nodes = {"encoder": content["encoder"], "head": content["head"]}
    require_trusted(nodes, trust)
    if fault := next(value_faults(nodes), None):
        raise ConfigError(f"{path}: {fault}")
    tokenizer = nodes["encoder"].get("tokenizer")
    if isinstance(tokenizer, dict) and tokenizer.get("name") == TOKENIZER_IN_FOLDER:
        tokenizer["name"] = str(folder)
    data = {key: content[key] for key in ("interpolation", "resize_mode") if key in content}
    config: dict[str, Any] = {**nodes, "seed": 0, "data": data}
    if PAIR in content:
        io.require_fields(path, content, {PAIR: dict}, REMEDY)
        config[PAIR] = {key: content[PAIR].get(key) for key in ("log_scale", "bias")}
        io.require_fields(path, config[PAIR], dict.fromkeys(config[PAIR], io.NUMBER), REMEDY)
    weights = read_weights(folder / WEIGHTS)
    dtype = next((value.dtype for value in weights.values() if value.is_floating_point()), None)
    return LoadedModel(build_trained(config, weights, folder / WEIGHTS, REMEDY, trust, dtype), config)


def require_data_only(folder: Path) -> None:
    """Raise ConfigError if a model's directory has links that lead out of it, or a JSON file that names code."""
    # Files of the hub's cache are links to its blobs.
    blobs = [folder.resolve().parent.parent / "blobs"] if folder.resolve().parent.name == "snapshots" else []
    io.require_no_links(folder, *blobs)
    for file in sorted(folder.glob("*.json")):
        text = io.read_bytes(file, 64 * io.MB, REMEDY)
        try:
            settings = json.loads(text)
        except (ValueError, RecursionError):
            continue  # clipzoo.json is read below, with its own message; other files are not used
        # transformers would import the code that auto_map names.
        if isinstance(settings, Mapping) and "auto_map" in settings:
            raise ConfigError(f"{file} names code in auto_map: clipzoo executes no code of a model; remove the entry")


def value_faults(nodes: Mapping[str, Any]) -> Iterator[str]:
    """Yield the faults of a published configuration: other weights, variables, paths outside its directory."""
    for key, value in values_of(nodes):
        if key.endswith("pretrained") and value not in (None, False):
            yield f"{key}={value} asks for other weights than those of the directory"
        if not isinstance(value, str):
            continue
        if "${" in value:
            yield f"{key} refers to a variable, {value}: a published model has plain values"
        if value.startswith(OUTSIDE_PREFIXES) or "://" in value or ".." in value.replace("\\", "/").split("/"):
            yield f"{key}={value} names a place outside the directory"


def read_weights(path: Path, remedy: str = REMEDY) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. remedy: for messages. Raises DamagedFileError."""
    if not path.exists():
        pickles = sorted(file.name for file in path.parent.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".pkl"))
        note = f"{', '.join(pickles)} may execute code and is not read; " if pickles else ""
        raise io.DamagedFileError(path, "is missing", note + remedy)
    return read_tensors(path, remedy)
