"""Adapters of a run in peft's format, for models of timm, transformers and open_clip."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from clipzoo import io
from clipzoo.encoders.tuning import adapters_of
from clipzoo.errors import ConfigError
from clipzoo.training import checkpoint_files
from clipzoo.training.tuned import read_frozen

TOWERS = ("image", "text")
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def save_adapters(run: str | Path, folder: str | Path) -> list[Path]:
    """Write the low-rank adapters of a run's newest checkpoint to <folder>/image and <folder>/text.

    Names of modules are those of the tower's trunk: a model of timm, transformers or open_clip. `MultiheadAttention`,
    as open_clip has it, is read rightly by peft only in part: peft 0.21 adds the adapter of `out_proj` twice.

    Returns:
        The folders written, one for each tower with adapters.

    Raises:
        ConfigError: the run has no checkpoint or no adapters.
    """
    newest = checkpoint_files.load_newest(Path(run) / "checkpoints")
    if newest is None:
        raise ConfigError(f"{run} has no valid checkpoint: train first")
    state = {**read_frozen(Path(run), newest[0]), **newest[0]["model"]}
    written = [
        _save_tower(adapters, state, Path(folder) / name)
        for name in TOWERS
        if (adapters := _of_tower(adapters_of(state), name))
    ]
    if not written:
        raise ConfigError(f"{run} has no adapters: train with tune/image=lora or tune/text=lora")
    return written


def _of_tower(adapters: Mapping[str, dict[str, Tensor]], name: str) -> dict[str, dict[str, Tensor]]:
    prefix = f"encoder.{name}_tower."
    return {weight: parts for weight, parts in adapters.items() if weight.startswith(prefix)}


def _save_tower(adapters: Mapping[str, dict[str, Tensor]], state: Mapping[str, Tensor], folder: Path) -> Path:
    """Write the adapters of one tower. state: of the model, for the shapes of the weights."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    targets: list[str] = []
    attentions = {weight.removesuffix(".in_proj_weight") for weight in adapters if weight.endswith(".in_proj_weight")}
    for weight, parts in adapters.items():
        path, _, attribute = weight.rpartition(".")
        owner, _, last = path.rpartition(".")
        if attribute == "in_proj_weight":
            module = path
            if f"{path}.out_proj.weight" not in adapters:
                tensors |= _pair(f"{_inner(path)}.base_layer.out_proj", _zeros(parts, state[f"{path}.out_proj.weight"]))
        else:
            # peft adapts the two projections of torch's MultiheadAttention together.
            module = f"{owner}.base_layer.{last}" if owner in attentions else path
        tensors |= _pair(_inner(module), _shaped(parts, state[weight]))
        if owner not in attentions:
            targets.append(_inner(path))
    first = next(iter(adapters.values()))
    rank = len(first["lora_A"])
    io.make_folder(folder)
    with io.whole(folder / WEIGHTS) as file:
        file.write(save(tensors, metadata={"format": "pt"}))
    io.write_json(
        folder / CONFIG,
        {
            "peft_type": "LORA", "base_model_name_or_path": None, "task_type": None, "inference_mode": True,
            "r": rank, "lora_alpha": float(first["lora_scale"]) * rank, "lora_dropout": 0.0, "bias": "none",
            "fan_in_fan_out": False, "target_modules": targets,
        },
    )  # fmt: skip
    return folder


def _inner(path: str) -> str:
    """encoder.image_tower.trunk.blocks.0 -> blocks.0."""
    return path.split(".", 2)[2].removeprefix("trunk.")


def _pair(module: str, parts: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {
        f"base_model.model.{module}.lora_{name}.weight": part.contiguous()
        for name, part in zip("AB", parts, strict=True)
    }


def _shaped(parts: Mapping[str, Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
    """lora_A [r, i, ...] and lora_B [o, r, 1, ...], as peft's layers for convolutions have them."""
    rank = len(parts["lora_A"])
    return (
        parts["lora_A"].view(rank, *weight.shape[1:]),
        parts["lora_B"].view(len(weight), rank, *(1 for _ in weight.shape[2:])),
    )


def _zeros(parts: Mapping[str, Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
    """An adapter without effect."""
    rank = len(parts["lora_A"])
    return torch.zeros(rank, weight.shape[1]), torch.zeros(len(weight), rank)
