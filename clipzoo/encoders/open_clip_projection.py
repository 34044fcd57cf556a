"""The last linear map of open_clip's towers, from features to embeddings. In clipzoo it belongs to the head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def projection_path(tower: Any) -> str | None:
    """Return the name of a tower's last linear map, a module or a matrix [w, d]; None if it ends without one."""
    from open_clip.hf_model import HFTextEncoder
    from open_clip.modified_resnet import ModifiedResNet
    from open_clip.timm_model import TimmModel

    if isinstance(tower, ModifiedResNet):
        return "attnpool.c_proj"
    if isinstance(tower, HFTextEncoder):
        return {nn.Linear: "proj", nn.Sequential: "proj.2"}.get(type(tower.proj))
    if isinstance(tower, TimmModel):
        if paths := [path for name, path in TIMM_HEADS.items() if hasattr(tower.head, name)]:
            return paths[0]
        path = f"trunk.{tower.trunk.pretrained_cfg['classifier']}"
        return path if isinstance(tower.get_submodule(path), nn.Linear) else None
    path = "proj" if hasattr(tower, "proj") else "text_projection"
    return None if getattr(tower, path) is None else path


TIMM_HEADS = {"proj": "head.proj", "mlp": "head.mlp.fc2"}
"""Part of the head behind a timm trunk -> its last linear map."""


def remove_projection(tower: Any) -> int:
    """Remove the last linear map of a tower and return the width of the features before it."""
    path = projection_path(tower)
    if path is None:
        return _width(tower)
    parent, _, name = path.rpartition(".")
    owner = tower.get_submodule(parent)
    projection = getattr(owner, name)
    if isinstance(projection, nn.Linear):
        setattr(owner, name, nn.Identity())
        return projection.in_features
    width: int = projection.shape[0]
    setattr(owner, name, None)
    return width


def taken_projection(state: Mapping[str, Tensor], path: str | None, width: int) -> tuple[Tensor, Tensor | None]:
    """Return the matrix [w, d] and the bias [d], or None, of the last linear map in a tower's state.

    width: of the features, for the identity of a tower that ends without one.
    """
    if path is None:
        import torch

        return torch.eye(width), None
    if path in state:
        return state[path], None
    return state[f"{path}.weight"].mT, state.get(f"{path}.bias")


def _width(tower: Any) -> int:
    """Width of the features of a tower without projection."""
    trunk = getattr(tower, "trunk", None)
    if trunk is not None:
        return getattr(trunk, "head_hidden_size", None) or trunk.num_features
    width: int = getattr(tower, "width", 0) or tower.output_dim
    return width
