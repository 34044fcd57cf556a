"""Names of the same tensors in open_clip's models and in ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from clipzoo.encoders.open_clip_projection import projection_path, taken_projection

Rename = Callable[[str], str]
IMAGE, TEXT = "encoder.image_tower.", "encoder.text_tower."


def text_tower(peer: Any) -> Any:
    """Return the text tower of an open_clip model; of `CLIP` the model itself, which holds the tower's modules."""
    return getattr(peer, "text", peer)


def text_path(peer: Any) -> str | None:
    """Return the name of the last linear map of the text tower."""
    tower = text_tower(peer)
    if tower is peer:
        return None if peer.text_projection is None else "text_projection"
    return projection_path(tower)


def tower_states(peer: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of the image tower and of the text tower of an open_clip model, by open_clip's names.

    CoCa's decoder is left out.
    """
    state = peer.state_dict()
    image = {key.removeprefix("visual."): value for key, value in state.items() if key.startswith("visual.")}
    if text_tower(peer) is not peer:
        return image, {key.removeprefix("text."): value for key, value in state.items() if key.startswith("text.")}
    others = ("visual.", "logit_scale", "logit_bias")
    return image, {key: value for key, value in state.items() if not key.startswith(others)}


def names(peer: Any) -> tuple[Rename, Rename]:
    """Return the functions from a name in open_clip's image and text tower to that in our model."""
    from open_clip.hf_model import HFTextEncoder
    from open_clip.timm_model import TimmModel

    def in_text(name: str) -> str:
        if not isinstance(text_tower(peer), HFTextEncoder):
            return f"{TEXT}trunk.{name}"
        trunk = name.startswith("transformer.")
        return f"{TEXT}trunk.{name.removeprefix('transformer.')}" if trunk else f"{TEXT}{name}"

    prefix = IMAGE if isinstance(peer.visual, TimmModel) else f"{IMAGE}trunk."
    return lambda name: prefix + name, in_text


def without_projection(state: Mapping[str, Tensor], path: str | None) -> dict[str, Tensor]:
    """Return the state of a tower without its last linear map."""
    return {key: value for key, value in state.items() if key not in (path, f"{path}.weight", f"{path}.bias")}


def projections(peer: Any, widths: tuple[int, int]) -> list[tuple[Tensor, Tensor | None]]:
    """Return matrix and bias of the last linear maps, image first. widths: of the features before them."""
    paths = projection_path(peer.visual), text_path(peer)
    return [
        taken_projection(state, path, width)
        for state, path, width in zip(tower_states(peer), paths, widths, strict=True)
    ]
