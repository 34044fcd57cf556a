"""Inner product and distance heads against their formulas."""

from __future__ import annotations

import pytest
import torch

from clipzoo.errors import ConfigError
from tests.support.heads import assert_same_values_and_gradients, build_head, image_features, scored, text_features

TEMPERATURE = 0.3
FORMULAS = {
    "inner_product": lambda u, v: sum(a * b for a, b in zip(u, v, strict=True)) / TEMPERATURE,
    "distance": lambda u, v: -sum((a - b) ** 2 for a, b in zip(u, v, strict=True)) / (2 * TEMPERATURE),
}
every_tilting = pytest.mark.parametrize("name", FORMULAS)


@every_tilting
def test_values_and_gradients_equal_the_formula(name):
    head, image, text = build_head(name, f"head.temperature={TEMPERATURE}"), image_features(3), text_features(4)
    rows = [
        torch.stack([FORMULAS[name](u, v) for v in text.pooled @ head.text_projection])
        for u in image.pooled @ head.image_projection
    ]
    scores = scored(head, image, text)
    assert_same_values_and_gradients(head, scores, torch.stack(rows))
    # Prompts are averaged without normalisation; a distance to itself is zero, to all others negative.
    prompts = head.embed_text(text)
    torch.testing.assert_close(head.ensemble(prompts)[0], sum(prompts) / 4)
    if name == "distance":
        within = head.score(prompts, prompts)
        assert within.diagonal().abs().max() < 1e-13
        assert (within[~torch.eye(4, dtype=torch.bool)] < -0.1).all()


@every_tilting
def test_null_embedding_width_uses_the_pooled_features_and_needs_equal_widths(name):
    head = build_head(name, "head.embed_width=null", "encoder.text_width=12")
    image = image_features(3)
    assert list(head.parameters()) == []
    assert torch.equal(head.embed_image(image), image.pooled) and torch.equal(head.probe(image, "after"), image.pooled)
    with pytest.raises(ConfigError, match="image_width=12, text_width=10: without projections"):
        build_head(name, "head.embed_width=null")


@pytest.mark.parametrize(("bits", "error"), [(10, 0.05), (7, 0.5)])
def test_distance_is_exact_under_low_precision_products(bits, error):
    """tf32 and bf16, which GPUs multiply in: vectors of norm 23, whose rounded squares alone would be wrong by more."""
    drawn = torch.Generator().manual_seed(0)
    image = torch.randn(64, 512, generator=drawn)
    text = image + 0.3 * torch.randn(64, 512, generator=drawn)
    for temperature in (1.0, 0.7):
        head = build_head("distance", f"head.temperature={temperature}").float()
        left, right = (rounded(factor, bits).double() for factor in head.factors(image, text))
        exact = -(torch.cdist(image.double(), text.double()) ** 2) / (2 * temperature)
        assert (left @ right.mT - exact).abs().max() < error


@pytest.mark.parametrize("norm", [1.0, 100.0, 1000.0])
@pytest.mark.parametrize("spread", ["near a common vector", "in all directions, pairs near each other"])
@pytest.mark.parametrize("width", [8, 512])
def test_distances_in_float32_equal_float64_at_large_norms(norm, spread, width):
    drawn = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(48, width, generator=drawn), dim=1)
    image = norm * (directions[:1] if spread.startswith("near") else directions).expand(48, -1)
    image = image + torch.randn(48, width, generator=drawn) / width**0.5
    text = image + torch.randn(48, width, generator=drawn) / width**0.5
    head = build_head("distance", f"head.temperature={TEMPERATURE}").float()
    pairs = [vectors.clone().requires_grad_() for vectors in (image, text)]
    exact = [vectors.double().requires_grad_() for vectors in (image, text)]
    upstream = torch.randn(48, 48, generator=drawn)
    scores = head.score(*pairs)
    expected = -(exact[0][:, None] - exact[1]).square().sum(dim=2) / (2 * TEMPERATURE)
    # Within the rounding of the result itself.
    torch.testing.assert_close(scores.double(), expected, rtol=2e-7, atol=1e-9)
    (scores * upstream).sum().backward()
    (expected * upstream.double()).sum().backward()
    for vectors, reference in zip(pairs, exact, strict=True):
        scale = reference.grad.abs().max()
        assert (vectors.grad - reference.grad).abs().max() < 2e-6 * scale


def test_tiles_of_distances_equal_the_matrix_at_large_norms():
    drawn = torch.Generator().manual_seed(0)
    base = 100 * torch.nn.functional.normalize(torch.randn(1, 16, generator=drawn), dim=1)
    image, text = (base + torch.randn(24, 16, generator=drawn) for _ in range(2))
    head = build_head("distance").float()
    matrix, tiles = (head.similarity(image, text, tile=tile) for tile in (None, 7))
    for one, other in zip(
        (matrix.image_to_text, matrix.text_to_image), (tiles.image_to_text, tiles.text_to_image), strict=True
    ):
        torch.testing.assert_close(other.log_sum_exp(), one.log_sum_exp(), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(other.positives(), one.positives(), rtol=1e-6, atol=1e-5)


def rounded(vectors: torch.Tensor, bits: int) -> torch.Tensor:
    """To so many bits of mantissa."""
    mantissa, exponent = torch.frexp(vectors)
    return torch.ldexp((mantissa * 2 ** (bits + 1)).round() / 2 ** (bits + 1), exponent)
