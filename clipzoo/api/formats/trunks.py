"""Facts of transformer trunks that the configurations of transformers' models state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from clipzoo.api.transformers.ties import Ties, left_out
from clipzoo.model import Model

OWN = ("head.log_scale", "head.image_projection", "head.image_bias", "head.text_projection", "head.text_bias")
"""Tensors of the head; each format has its own place for them."""


def epsilon(trunk: nn.Module) -> float | None:
    """Return the epsilon of the layer norms; None if they have several."""
    found = {module.eps for module in trunk.modules() if isinstance(module, nn.LayerNorm)}
    return found.pop() if len(found) == 1 else None


def activation(module: nn.Module) -> str | None:
    """Return transformers' name of an activation, None if it has none."""
    names = {"QuickGELU": "quick_gelu", "GELUTanh": "gelu_pytorch_tanh", "ReLU": "relu"}
    if isinstance(module, nn.GELU):
        return "gelu_pytorch_tanh" if module.approximate == "tanh" else "gelu"
    return names.get(type(module).__name__)


def trunk_faults(what: str, trunk: nn.Module, act: nn.Module) -> list[str]:
    """Return the reasons why one epsilon and one named activation do not describe a trunk."""
    reasons = []
    if epsilon(trunk) is None:
        reasons.append(f"the layer norms of {what} have several epsilons")
    if activation(act) is None:
        reasons.append(f"the activation of {what} is {type(act).__name__}")
    return reasons


def tensor_faults(model: Model, ties: Ties) -> list[str]:
    """Return the reasons why the tensors of the towers are not those of the other model."""
    state: Mapping[str, Tensor] = model.state_dict()
    missing = [name for one in ties for name in one.ours if name not in state and name not in OWN]
    others = [name for name in left_out(ties, state) if name not in OWN]
    reasons = [f"it has {_shown(others)}"] if others else []
    return [*reasons, f"it lacks {_shown(missing)}"] if missing else reasons


def open_clip_blocks(trunk: Any) -> dict[str, Any]:
    """Return the settings of open_clip's transformer as transformers' configuration names them."""
    block = trunk.transformer.resblocks[0]
    return {
        "num_hidden_layers": len(trunk.transformer.resblocks), "num_attention_heads": block.attn.num_heads,
        "intermediate_size": block.mlp.c_fc.out_features, "hidden_act": activation(block.mlp.gelu),
        "layer_norm_eps": epsilon(trunk), "attention_dropout": 0.0,
    }  # fmt: skip


def _shown(names: list[str]) -> str:
    short = [name.removeprefix("encoder.") for name in names[:2]]
    return ", ".join(short) + (f" and {len(names) - 2} more tensors" if len(names) > 2 else "")
