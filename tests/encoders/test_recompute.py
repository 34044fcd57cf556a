"""Recomputation of all or of every k-th block: equal features and gradients, and less memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from clipzoo.encoders.base import ImageTower
from clipzoo.encoders.huggingface import HuggingFaceText
from clipzoo.encoders.image import ClipResNet, ClipViT, TimmTower
from clipzoo.encoders.open_clip import OpenClipImage, OpenClipText
from clipzoo.encoders.text import ClipTextTower

SMALL = {"width": 32, "layers": 4, "heads": 2}
BERT = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
TOWERS = {
    "clip": lambda k: ClipViT(32, 8, 32, 4, 2, False, checkpoint=k),
    "resnet": lambda k: ClipResNet(32, (1, 1, 1, 1), 4, 2, checkpoint=k),
    "timm": lambda k: TimmTower(
        "vit_tiny_patch16_224", 32, False, {"depth": 4, "embed_dim": 32, "num_heads": 2}, checkpoint=k
    ),
    "timm, convolutions": lambda k: TimmTower("resnet18", None, False, {}, checkpoint=k),
    "open_clip": lambda k: OpenClipImage("ViT-B-32", 32, {"width": 64, "layers": 4, "patch_size": 16}, checkpoint=k),
    "clip's text": lambda k: ClipTextTower(8, 99, 32, 4, 2, False, False, 98, 1e-5, checkpoint=k),
    "open_clip's text": lambda k: OpenClipText("ViT-B-32", 8, SMALL, checkpoint=k),
    "open_clip's text in both directions": lambda k: OpenClipText(
        "ViT-B-32", 8, {**SMALL, "no_causal_mask": True}, checkpoint=k
    ),
    "transformers": lambda k: HuggingFaceText("bert", BERT, "clip", end_token=98, checkpoint=k),
}  # fmt: skip


def inputs(tower: nn.Module) -> Tensor:
    torch.manual_seed(1)
    if isinstance(tower, ImageTower):
        return torch.randn(4, 3, 32, 32)
    ids = torch.randint(1, 90, (4, 8))
    ids[:, 5] = 98
    return ids


def run(tower: nn.Module, tokens: bool) -> tuple[Tensor, list[Tensor | None], int]:
    """Return features, gradients, and bytes that autograd keeps for the backward pass besides parameters."""
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in tower.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if (pointer := tensor.untyped_storage().data_ptr()) not in own:
            kept[pointer] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(2)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        features = tower(inputs(tower)) if tokens else None
        pooled = features.pooled if features is not None else tower.pooled(inputs(tower))
    size = sum(kept.values())
    loss = pooled.square().sum()
    if features is not None and features.tokens is not None:
        loss = loss + features.tokens.cos().sum()
    gradients = torch.autograd.grad(loss, list(tower.parameters()), allow_unused=True)
    return pooled.detach(), list(gradients), size


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "pooled"])
@pytest.mark.parametrize("name", TOWERS)
def test_every_second_block_keeps_less_than_none_and_more_than_all_with_equal_gradients(name, tokens):
    torch.manual_seed(0)
    plain = TOWERS[name](False).train()
    pooled, gradients, size = run(plain, tokens)
    sizes = [size]
    for every in (2, True):
        tower = TOWERS[name](every).train()
        tower.load_state_dict(plain.state_dict())
        for one in (tower, copy.deepcopy(tower)):
            other, others, size = run(one, tokens)
            torch.testing.assert_close(other, pooled, rtol=0, atol=0)
            assert all(
                first is second or torch.equal(first, second) for first, second in zip(others, gradients, strict=True)
            )
        sizes.append(size)
        tower.eval()
        run(tower, tokens)
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.slow
def test_a_compiled_tower_recomputes():
    torch.manual_seed(0)
    plain = TOWERS["clip"](False).train()
    tower = TOWERS["clip"](2).train()
    tower.load_state_dict(plain.state_dict())
    compiled = torch.compile(tower.pooled, backend="aot_eager")
    image = inputs(tower)
    expected = torch.autograd.grad(plain.pooled(image).square().sum(), list(plain.parameters()), allow_unused=True)
    actual = torch.autograd.grad(compiled(image).square().sum(), list(tower.parameters()), allow_unused=True)
    for first, second in zip(actual, expected, strict=True):
        assert (first is None) == (second is None)
        if first is not None:
            torch.testing.assert_close(first, second)
