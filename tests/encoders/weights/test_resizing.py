"""Positional embeddings of another size, judged by open_clip and timm."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from open_clip.model import resize_pos_embed, resize_text_pos_embed
from timm.layers import resample_abs_pos_embed

from clipzoo.encoders.weights import resized


@pytest.mark.parametrize(("old", "new"), [(7, 12), (12, 7)])
def test_image_positions_are_resized_as_open_clip_does(old, new):
    value = torch.randn(1 + old**2, 8)
    state = {"visual.positional_embedding": value.clone()}
    target = torch.zeros(1 + new**2, 8)
    peer = SimpleNamespace(visual=SimpleNamespace(grid_size=(new, new)), state_dict=lambda: {})
    peer.visual.positional_embedding = target
    resize_pos_embed(state, peer)
    ours = resized("trunk.positional_embedding", value, target, True, None)
    torch.testing.assert_close(ours, state["visual.positional_embedding"])


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_image_positions_are_resized_as_timm_does_and_keep_class_and_register_tokens(prefix):
    value = torch.randn(1, prefix + 14**2, 8)
    ours = resized("trunk.pos_embed", value, torch.zeros(1, prefix + 10**2, 8), True, None)
    torch.testing.assert_close(ours, resample_abs_pos_embed(value, [10, 10], num_prefix_tokens=prefix))
    assert torch.equal(ours[:, :prefix], value[:, :prefix])


def test_more_text_positions_are_interpolated_as_open_clip_does_and_fewer_are_the_first():
    value = torch.randn(12, 8)
    state = {"positional_embedding": value.clone()}
    target = torch.zeros(20, 8)
    resize_text_pos_embed(state, SimpleNamespace(positional_embedding=target))
    torch.testing.assert_close(
        resized("positional_embedding", value, target, False, None), state["positional_embedding"]
    )
    assert torch.equal(resized("positional_embedding", value, torch.zeros(5, 8), False, None), value[:5])


def test_embeddings_of_distinct_pads_keep_their_values_where_the_source_has_none():
    value, target = torch.ones(10, 4), torch.zeros(14, 4)
    ours = resized("trunk.token_embedding.weight", value, target, False, 10)
    assert torch.equal(ours, torch.cat([value, target[10:]]))


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("trunk.conv1.weight", (8, 3, 16, 16), (8, 3, 8, 8)),
        ("trunk.positional_embedding", (50, 8), (50, 16)),
        ("trunk.token_embedding.weight", (9, 4), (14, 4)),
    ],
)
def test_no_other_tensor_is_resized(name, before, after):
    assert resized(name, torch.ones(before), torch.ones(after), True, 10) is None
