"""Matryoshka: prefixes of the embeddings, trained by any objective without state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clipzoo.errors import ConfigError
from clipzoo.heads.pairs import Scope
from clipzoo.heads.vector import ClipHead
from clipzoo.objectives.base import Objective, check_pair
from clipzoo.objectives.cyclip import CyCLIP
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.objectives.siglip import SigLIP
from clipzoo.objectives.sogclr import SogCLR
from clipzoo.types import Features, Loss
from tests.golden_next.test_reweighted import close, in_tiles, read
from tests.support.objectives import batch, progress


def head_of(width: int, matryoshka: list[int], scale: float = 1 / 0.07) -> ClipHead:
    """CLIP's head on embeddings of this width, unprojected."""
    learnable = scale > 1
    head = ClipHead(width, width, width, 1 / scale, 1000.0, learnable, matryoshka=matryoshka).double()
    for matrix in (head.image_projection, head.text_projection):
        matrix.data.copy_(torch.eye(width))
    head.log_scale.data.fill_(torch.tensor(scale, dtype=torch.float64).log())
    return head


def loss_of(objective: Objective, head: ClipHead, image: Tensor, text: Tensor, tile: int | None) -> Loss:
    similarity = head(Features(image), Features(text), Scope(tile=tile))
    return objective(similarity, batch(list(range(len(image)))), progress())


@in_tiles
def test_matryoshka_is_the_sum_of_the_losses_of_renormalised_prefixes(tile):
    arrays = read("more")
    widths = arrays["matryoshka_dims"].tolist()
    image, text = (arrays[f"matryoshka_{view}_raw"].clone().requires_grad_() for view in ("image", "text"))
    head = head_of(8, widths, arrays["matryoshka_scale"].item())
    loss = loss_of(InfoNCE(0.5, 0.5), head, image, text, tile)
    close(loss.total.detach(), arrays["matryoshka_loss"])
    assert {"loss_prefix_4", "loss_prefix_2"} <= loss.logs.keys() and "loss_prefix_8" not in loss.logs
    gradients = torch.autograd.grad(loss.total, (image, text, head.log_scale))
    close(gradients[0], arrays["matryoshka_grad_image_raw"])
    close(gradients[1], arrays["matryoshka_grad_text_raw"])
    close(gradients[2] / arrays["matryoshka_scale"], arrays["matryoshka_grad_scale"])


@in_tiles
def test_the_whole_width_is_the_head_itself(tile):
    image, text = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain, whole = (loss_of(InfoNCE(0.5, 0.5), head_of(8, widths), image, text, tile) for widths in ([], [8]))
    assert torch.equal(plain.total, whole.total) and plain.logs.keys() == whole.logs.keys()


@in_tiles
def test_any_objective_without_state_trains_prefixes(tile):
    image, text = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for objective in (SigLIP(10.0, -2.0, 0.5, 0.5), CyCLIP(0.1, True, 100.0, 0.2, 0.3)):
        objective.double()
        ours = loss_of(objective, head_of(8, [3], 1.0), image, text, tile).total
        parts = [loss_of(objective, head_of(w, [], 1.0), image[:, :w], text[:, :w], tile).total for w in (8, 3)]
        torch.testing.assert_close(ours, sum(parts), rtol=1e-12, atol=1e-12)


def test_prefixes_are_refused_by_objectives_with_state_and_if_they_are_too_wide():
    (reason,) = check_pair(head_of(8, [4], 1.0), SogCLR(0.1, 0.8, False)).reasons
    assert "head.matryoshka=[]" in reason
    assert check_pair(head_of(8, [8], 1.0), SogCLR(0.1, 0.8, False)).compatible
    with pytest.raises(ConfigError, match=r"head\.matryoshka=\[9\].*head\.embed_width=8"):
        head_of(8, [9])
