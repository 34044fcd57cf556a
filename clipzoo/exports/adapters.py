"""Adapters of a run in peft's format, for models of timm, transformers and open_clip."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from clipzoo import io
from clipzoo.encoders.tuning import adapters_of
from clipzoo.errors import ConfigError
from clipzoo.exports.files import save_weights
from clipzoo.training import checkpoint_files
from clipzoo.training.tuned import VIEWS, read_frozen


def save_adapters(run: str | Path, folder: str | Path) -> list[Path]:
    """Write the low-rank adapters of a run's newest checkpoint to <folder>/image and <folder>/text; return the folders.

    Names of modules are those of the tower's trunk: a model of timm, transformers or open_clip. peft does
    not fully support `MultiheadAttention`, as in open_clip: peft 0.21 adds the adapter of `out_proj` twice.
    Raises ConfigError if the run has no checkpoint or no adapters.
    """
    if (newest := checkpoint_files.load_newest(Path(run) / "checkpoints")) is None:
        raise ConfigError(f"{run} has no valid checkpoint: train first")
    state = {**read_frozen(Path(run), newest[0]), **newest[0]["model"]}
    written = []
    for view in VIEWS:
        prefix = f"encoder.{view}_tower."
        inner = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        tower = {key.removeprefix("trunk."): value for key, value in inner.items()}
        if not (adapters := adapters_of(tower)):
            continue
        tensors: dict[str, Tensor] = {}
        targets: list[str] = []
        attentions = {name.removesuffix(".in_proj_weight") for name in adapters if name.endswith(".in_proj_weight")}
        first = next(iter(adapters.values()))
        rank = len(first["lora_A"])
        for weight, parts in adapters.items():
            path, _, attribute = weight.rpartition(".")
            owner, _, last = path.rpartition(".")
            module, output = path, f"{path}.out_proj.weight"
            if attribute != "in_proj_weight":
                module = f"{owner}.base_layer.{last}" if owner in attentions else path
            elif output not in adapters:
                # peft adapts both projections of torch's MultiheadAttention together: zeros have no effect.
                outputs, inputs = tower[output].shape
                zeros = f"base_model.model.{path}.base_layer.out_proj"
                tensors[f"{zeros}.lora_A.weight"] = torch.zeros(rank, inputs)
                tensors[f"{zeros}.lora_B.weight"] = torch.zeros(outputs, rank)
            # lora_A [r, i, ...] and lora_B [o, r, 1, ...], as peft's layers for convolutions have them.
            shape, name = tower[weight].shape, f"base_model.model.{module}"
            tensors[f"{name}.lora_A.weight"] = parts["lora_A"].view(rank, *shape[1:])
            tensors[f"{name}.lora_B.weight"] = parts["lora_B"].view(shape[0], rank, *(1 for _ in shape[2:]))
            if owner not in attentions:
                targets.append(path)
        written.append(Path(folder) / view)
        save_weights(tensors, written[-1] / "adapter_model.safetensors")
        io.write_json(written[-1] / "adapter_config.json", {
            "peft_type": "LORA", "base_model_name_or_path": None, "task_type": None, "inference_mode": True,
            "r": rank, "lora_alpha": float(first["lora_scale"]) * rank, "lora_dropout": 0.0, "bias": "none",
            "fan_in_fan_out": False, "target_modules": targets,
        })  # fmt: skip
    if not written:
        raise ConfigError(f"{run} has no adapters: train with tune/image=lora or tune/text=lora")
    return written
