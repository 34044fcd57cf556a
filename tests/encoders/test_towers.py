"""Towers against open_clip's forward passes, and the properties that heads and loaders require."""

from __future__ import annotations

import open_clip
import pytest
import torch
from open_clip.transformer import TextTransformer

from clipzoo.encoders.image import ClipViT
from clipzoo.encoders.text import ClipTextTower
from clipzoo.encoders.towers import TwoTowers
from clipzoo.errors import ConfigError

CAPTIONS = ["a red circle", "two small blue squares above a striped triangle", ""]


def text_tower(**changes) -> ClipTextTower:
    torch.manual_seed(0)
    arguments = dict(
        context_length=77, vocabulary=49408, width=32, layers=2, heads=2, quick_gelu=False, distinct_pads=False,
        end_token=49407, norm_eps=1e-5,
    )  # fmt: skip
    return ClipTextTower(**{**arguments, **changes}).double()


def test_text_tower_equals_open_clips_with_the_same_weights():
    ours = text_tower()
    peer = TextTransformer(width=32, layers=2, heads=2, output_dim=None, proj_type="none", output_tokens=True).double()
    peer.load_state_dict(ours.trunk.state_dict())
    ids = open_clip.tokenize(CAPTIONS)
    features = ours(ids)
    pooled, tokens = peer(ids)
    torch.testing.assert_close(features.pooled, pooled, rtol=0, atol=1e-12)
    real = features.mask
    torch.testing.assert_close(features.tokens[real], tokens[real], rtol=0, atol=1e-12)
    # Trimming the padding changes no pooled feature.
    longest = int(real.sum(dim=1).max())
    torch.testing.assert_close(ours(ids[:, :longest]).pooled, pooled, rtol=0, atol=1e-12)


@pytest.mark.parametrize("changes", [{}, {"distinct_pads": True}, {"checkpoint": True, "quick_gelu": True}])
def test_pooled_features_without_tokens_are_those_beside_the_tokens_with_their_gradient(changes):
    tower, ids = text_tower(**changes), open_clip.tokenize([*CAPTIONS, "a", "b c d e f g h i j"])[:, :16]
    pooled = tower.pooled(ids), tower(ids).pooled
    torch.testing.assert_close(*pooled, rtol=0, atol=1e-12)
    direction = torch.randn_like(pooled[0])
    gradients = [torch.autograd.grad((value * direction).sum(), list(tower.parameters())) for value in pooled]
    for without, beside in zip(*gradients, strict=True):
        torch.testing.assert_close(without, beside, rtol=0, atol=1e-12)


def test_mask_ends_at_the_first_end_token_whatever_follows():
    # The exclamation mark has the id 0, with which CLIP's tokenizer pads; it is not padding.
    ids = torch.tensor(
        [[49406, 5, 49407, 0, 0], [49406, 49407, 49407, 7, 7], [49406, 1, 2, 3, 49407], [49406, 0, 5, 49407, 0]]
    )
    assert text_tower()(ids).mask.sum(dim=1).tolist() == [3, 2, 5, 4]
    assert text_tower()(ids).mask.int().diff(dim=1).max() <= 0


def test_distinct_pads_use_a_row_each_counted_from_the_end_token():
    tower = text_tower(distinct_pads=True, context_length=6)
    assert tower.trunk.token_embedding.num_embeddings == 49408 + 5
    seen = []
    tower.trunk.token_embedding.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    tower(torch.tensor([[49406, 49407, 0, 0, 0, 0], [49406, 5, 6, 49407, 0, 9]]))
    assert seen[0].tolist() == [[49406, 49407, 49408, 49409, 49410, 49411], [49406, 5, 6, 49407, 49408, 49409]]


def test_checkpointed_activations_change_no_gradient():
    gradients = []
    for recompute in (False, True):
        tower = text_tower(checkpoint=recompute).train()
        tower(open_clip.tokenize(CAPTIONS)).pooled.square().sum().backward()
        gradients.append(tower.trunk.token_embedding.weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-12)


def test_uint8_images_are_normalised_as_their_float_form_and_others_are_refused():
    mean, std = [0.48, 0.45, 0.40], [0.26, 0.25, 0.27]
    image_tower = ClipViT(image_size=32, patch_size=8, width=32, layers=1, heads=2, quick_gelu=False)
    encoder = TwoTowers(image_tower, text_tower(), 32, 32, 32, 77, open_clip.tokenize, mean, std).double()
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    by_hand = (pixels.double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    features = encoder.image(pixels)
    torch.testing.assert_close(features.pooled, image_tower(by_hand).pooled, rtol=0, atol=1e-5)
    assert features.tokens.shape == (2, 17, 32)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        with pytest.raises(ConfigError, match=rf"images are {dtype}, .* pass .*\.round\(\)\.to\(torch\.uint8\) for fl"):
            encoder.image(pixels.to(dtype))
    with pytest.raises(ConfigError, match="image_width=64, image_tower.width=32: image_width must be"):
        TwoTowers(image_tower, text_tower(), 64, 32, 32, 77, open_clip.tokenize, mean, std)
