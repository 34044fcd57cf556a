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
    adapters, written = adapters_of(state), []
    for name in TOWERS:
        prefix = f"encoder.{name}_tower."
        if of_tower := {weight: parts for weight, parts in adapters.items() if weight.startswith(prefix)}:
            written.append(_save_tower(of_tower, state, Path(folder) / name))
    if not written:
        raise ConfigError(f"{run} has no adapters: train with tune/image=lora or tune/text=lora")
    return written


def _save_tower(adapters: Mapping[str, dict[str, Tensor]], state: Mapping[str, Tensor], folder: Path) -> Path:
    """Write the adapters of one tower. state: of the model, for the shapes of the weights."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    targets: list[str] = []
    attentions = {weight.removesuffix(".in_proj_weight") for weight in adapters if weight.endswith(".in_proj_weight")}
    first = next(iter(adapters.values()))
    rank = len(first["lora_A"])
    for weight, parts in adapters.items():
        path, _, attribute = weight.rpartition(".")
        owner, _, last = path.rpartition(".")
        if attribute == "in_proj_weight":
            module, output = path, f"{path}.out_proj.weight"
            if output not in adapters:
                # peft adapts the two projections of torch's MultiheadAttention together: zeros are without effect.
                outputs, inputs = state[output].shape
                zeros = torch.zeros(rank, inputs), torch.zeros(outputs, rank)
                tensors |= _named(f"{_inner(path)}.base_layer.out_proj", *zeros)
        else:
            module = f"{owner}.base_layer.{last}" if owner in attentions else path
        # lora_A [r, i, ...] and lora_B [o, r, 1, ...], as peft's layers for convolutions have them.
        shape = state[weight].shape
        lora_a = parts["lora_A"].view(rank, *shape[1:])
        lora_b = parts["lora_B"].view(shape[0], rank, *(1 for _ in shape[2:]))
        tensors |= _named(_inner(module), lora_a, lora_b)
        if owner not in attentions:
            targets.append(_inner(path))
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


def _named(module: str, lora_a: Tensor, lora_b: Tensor) -> dict[str, Tensor]:
    name = f"base_model.model.{module}"
    return {f"{name}.lora_A.weight": lora_a.contiguous(), f"{name}.lora_B.weight": lora_b.contiguous()}
