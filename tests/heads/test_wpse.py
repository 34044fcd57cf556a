"""WPSE against loops over points and features, and its random features against the exact kernels."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm
from torch import Tensor

from clipzoo.errors import ConfigError
from clipzoo.heads.wpse import GaussianKernel, InverseMultiquadricKernel, WpseHead
from clipzoo.types import Features
from tests.support.heads import (
    EMBED_WIDTH,
    IMAGE_WIDTH,
    assert_same_values_and_gradients,
    build_head,
    image_features,
    scored,
    text_features,
    trimmed,
)


def oracle(head: WpseHead, image: Features, text: Features, alpha, positive: bool, caption: bool, mean: bool) -> Tensor:
    """scale * sum_ij w_i w'_j [a1 v_i.u_j + a2 (2 / D) sum_t cos(...) cos(...)], divided by M M' for the mean."""

    def points(side, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
        points = []
        for token in tokens:
            vector = sum(token[i] * side.projection[i] for i in range(len(token)))
            raw = sum(token[i] * side.weight_projection[i, 0] for i in range(len(token)))
            weight = 100 / (1 + torch.exp(-raw / 100)) if positive else 100 * torch.tanh(raw / 100)
            points.append((weight, vector / (vector * vector).sum().sqrt()))
        return points

    def kernel(v: Tensor, u: Tensor) -> Tensor:
        waves = torch.zeros((), dtype=torch.float64)
        for omega, phase in zip(head.frequencies, head.phases, strict=True):
            waves = waves + torch.cos(omega @ v + phase) * torch.cos(omega @ u + phase)
        return alpha[0] * (v @ u) + (alpha[1] * 2 / len(head.phases) * waves if alpha[1] else 0)

    rows = []
    for tokens in image.tokens:
        row = []
        for words, mask in zip(text.tokens, text.mask, strict=True):
            left, right = points(head.image, tokens), points(head.text, words[mask] if caption else words)
            pairs = sum(w * w2 * kernel(v, u) for w, v in left for w2, u in right)
            row.append(head.scale * pairs / (len(left) * len(right) if mean else 1))
        rows.append(torch.stack(row))
    return torch.stack(rows)


@pytest.mark.medium
@pytest.mark.parametrize("kernel", ["gaussian", "imq"])
@pytest.mark.parametrize(
    ("alpha", "weights", "points", "reduction"),
    [
        ((0.667, 0.333), "signed", "all", "mean"),
        ((0.5, 0.5), "positive", "caption", "mean"),
        ((0.0, 1.0), "signed", "caption", "sum"),
        ((1.0, 0.0), "signed", "all", "mean"),
    ],
)
def test_values_and_gradients_equal_loops_over_points_and_features(kernel, alpha, weights, points, reduction):
    head = build_head(
        "wpse", f"head/kernel={kernel}", f"head.alpha={list(alpha)}", f"head.weights={weights}",
        f"head.text_points={points}", f"head.reduction={reduction}", "head.features=4",
    )  # fmt: skip
    image, text = image_features(2), text_features(3)
    scores = scored(head, image, text)
    expected = oracle(head, image, text, alpha, weights == "positive", points == "caption", reduction == "mean")
    assert_same_values_and_gradients(head, scores, expected)


@pytest.mark.medium
@pytest.mark.parametrize("kernel", ["gaussian", "imq"])
def test_random_features_converge_to_the_exact_kernel_like_one_over_root_of_their_number(kernel):
    image, text = image_features(4), text_features(4)
    sizes, draws = [64, 256, 1024, 4096], 60
    root_mean_square = []
    for size in sizes:
        head = build_head("wpse", f"head/kernel={kernel}", f"head.evaluation_features={size}").eval()
        exact = exact_scores(head, image, text, kernel)
        errors = []
        for draw in range(draws):
            head.resample(draw)
            errors.append(scored(head, image, text).detach().numpy() - exact)
        error = np.array(errors)
        assert (np.abs(error.mean(0)) < 4.5 * error.std(0) / math.sqrt(draws)).all(), "biased"
        root_mean_square.append(math.sqrt((error**2).mean()))
    slope = np.polyfit(np.log(sizes), np.log(root_mean_square), 1)[0]
    assert -0.55 < slope < -0.45


def exact_scores(head: WpseHead, image: Features, text: Features, kernel: str) -> np.ndarray:
    """Eq. 6 with the kernel's formula at width 0.75, alpha (0.5, 0.5), in numpy."""

    def points(side, tokens: Tensor) -> tuple[np.ndarray, np.ndarray]:
        vectors = tokens.numpy() @ side.projection.detach().numpy()
        weights = 100 * np.tanh(tokens.numpy() @ side.weight_projection.detach().numpy()[:, 0] / 100)
        return weights / weights.shape[1], vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)

    (w, v), (w2, u) = points(head.image, image.tokens), points(head.text, text.tokens)
    difference = v[:, None, :, None, :] - u[None, :, None, :, :]  # [n, k, M, M', d]
    squared = (difference**2).sum(-1)
    nonlinear = np.exp(-squared / (2 * 0.75**2)) if kernel == "gaussian" else 0.75 / np.sqrt(0.75**2 + squared)
    linear = np.einsum("nid,kjd->nkij", v, u)
    return head.scale.item() * np.einsum("ni,kj,nkij->nk", w, w2, 0.5 * linear + 0.5 * nonlinear)


def test_a_draw_depends_on_seed_mode_and_index_alone():
    def draw(head: WpseHead, training: bool, index: int) -> Tensor:
        head.train(training)
        head.resample(index)
        return torch.cat([head.frequencies, head.phases[:, None]], dim=1)[:512].float()

    draws = [draw(build_head("wpse", f"seed={seed}"), training, index)
             for seed in (0, 1) for training in (True, False) for index in (0, 1, 1000)]  # fmt: skip
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == len(draws)
    torch.manual_seed(77)
    assert torch.equal(draw(build_head("wpse").float(), True, 1000), draws[2])


def test_number_of_features_differs_between_training_and_evaluation_with_the_factor_following():
    head = build_head("wpse", "head.alpha=[0,1]", "head.evaluation_features=512")
    image = image_features(64)
    assert head.embed_image(image).shape == (64, 1024)
    training = head.embed_image(image).square().sum(1).mean()
    head.eval()
    assert head.embed_image(image).shape == (64, 512)
    torch.testing.assert_close(head.embed_image(image).square().sum(1).mean(), training, rtol=0.1, atol=0)


def test_phases_are_uniform_on_the_circle_and_evaluation_does_not_depend_on_the_training_step():
    head, other = build_head("wpse"), build_head("wpse")
    assert head.phases.min() >= 0 and head.phases.max() < 2 * math.pi and head.phases.max() > 6.2
    head.resample(123)
    assert not torch.equal(head.frequencies, other.frequencies)
    head.eval(), other.eval()
    assert torch.equal(head.frequencies, other.frequencies)


def test_a_draw_is_not_saved_so_that_the_number_of_features_may_change_and_a_linear_kernel_has_none():
    saved = build_head("wpse", "head.features=8").state_dict()
    assert not {"frequencies", "phases"} & set(saved)
    build_head("wpse", "head.features=16").load_state_dict(saved)
    linear = build_head("wpse", "head.alpha=[1,0]")
    assert not linear.stochastic and linear.frequencies.numel() == 0
    assert linear.embed_image(image_features(2)).shape == (2, EMBED_WIDTH)


def test_caption_points_do_not_depend_on_padding_and_the_mean_is_over_real_points():
    head, text = build_head("wpse", "head.text_points=caption"), text_features(4)
    text = Features(text.pooled[:3], text.tokens[:3], text.mask[:3])
    torch.testing.assert_close(head.embed_text(trimmed(text)), head.embed_text(text), rtol=1e-13, atol=1e-13)
    # A caption said twice over is the same distribution of points, so the same embedding.
    doubled = Features(text.pooled, torch.cat([text.tokens] * 2, dim=1), torch.cat([text.mask] * 2, dim=1))
    torch.testing.assert_close(head.embed_text(doubled), head.embed_text(text), rtol=1e-13, atol=1e-13)


def test_a_sample_without_points_is_the_zero_embedding_with_finite_gradients():
    head, text = build_head("wpse", "head.text_points=caption"), text_features(3)
    mask = text.mask.clone()
    mask[1] = False
    embedding = head.embed_text(Features(text.pooled, text.tokens, mask))
    assert (embedding[1] == 0).all()
    torch.testing.assert_close(embedding[[0, 2]], head.embed_text(text)[[0, 2]], rtol=0, atol=0)
    embedding.sum().backward()
    assert head.text.projection.grad.isfinite().all() and head.text.weight_projection.grad.isfinite().all()


def test_a_token_shorter_than_epsilon_is_divided_by_epsilon():
    head, tokens = build_head("wpse"), image_features(1).tokens
    along = torch.nn.functional.normalize(tokens @ head.image.projection, dim=-1)
    lengths = torch.linalg.vector_norm(tokens @ head.image.projection, dim=-1, keepdim=True)
    for length, expected in ((1e-7, 0.1), (1e-6, 1.0), (1e-4, 1.0)):
        torch.testing.assert_close(head.image.points(tokens * (length / lengths)), expected * along)


def test_scale_starts_at_the_inverse_temperature_without_exponential_and_is_clamped():
    head = build_head("wpse")
    assert head.scale.item() == pytest.approx(1 / 0.07)
    for value, expected in ((0.2, 1.0), (500.0, 100.0), (30.0, 30.0)):
        head.scale.data.fill_(value)
        head.clamp_()
        assert head.scale.item() == expected


def test_probe_before_the_projection_is_the_weighted_mean_of_the_tokens():
    head, image = build_head("wpse"), image_features(3)
    weights = 100 * torch.tanh(image.tokens @ head.image.weight_projection[:, 0] / 100)
    expected = torch.einsum("bm,bmw->bw", weights, image.tokens) / image.tokens.shape[1]
    torch.testing.assert_close(head.probe(image, "before"), expected)
    assert head.probe(image, "before").shape == (3, IMAGE_WIDTH)
    assert torch.equal(head.probe(image, "after"), head.embed_image(image))
    prompts = head.embed_text(text_features(3))
    torch.testing.assert_close(head.ensemble(prompts)[0], sum(prompts) / 3)  # not normalised


@pytest.mark.parametrize(
    ("override", "message"),
    [
        *((f"head.alpha={alpha}", "WpseHead: alpha") for alpha in ("[0,0]", "[-0.5,1.5]")),
        ("head.temperature=0.009", "min_scale=.*, temperature=.*, max_scale=100"),
        ("head.min_scale=20", "min_scale=.*, temperature=.*, max_scale=100"),
    ],
)  # fmt: skip
def test_kernel_weights_and_an_initial_scale_outside_their_range_are_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        build_head("wpse", override)


# Kernels against their formulas, and their frequencies against the kernels.

KERNELS = {
    GaussianKernel: lambda r, width: math.exp(-r * r / (2 * width * width)),
    InverseMultiquadricKernel: lambda r, width: width / math.sqrt(width * width + r * r),
}
every_kernel = pytest.mark.parametrize("kernel", KERNELS)
every_width = pytest.mark.parametrize("width", [0.5, 0.75, 1.0])


@every_kernel
@every_width
def test_value_is_the_formula(kernel, width):
    distances = [0.0, 1e-3, 0.3, 1.0, 2.0]
    values = kernel(width).value(torch.tensor(distances, dtype=torch.float64) ** 2)
    expected = torch.tensor([KERNELS[kernel](r, width) for r in distances], dtype=torch.float64)
    torch.testing.assert_close(values, expected, rtol=1e-14, atol=0)


@pytest.mark.medium
@every_kernel
@every_width
@pytest.mark.parametrize("dimensions", [2, 512])
def test_mean_cosine_of_the_frequencies_is_the_kernel_in_any_direction(kernel, width, dimensions):
    features = 20_000
    frequencies = kernel(width).frequencies(features, dimensions, torch.Generator().manual_seed(0)).double()
    assert frequencies.shape == (features, dimensions)
    directions = torch.nn.functional.normalize(
        torch.randn(3, dimensions, generator=torch.Generator().manual_seed(1)).double(), dim=1
    )
    for r in (0.1, 0.5, 1.0, 2.0):
        cosines = torch.cos(r * frequencies @ directions.mT)
        error = cosines.mean(dim=0) - KERNELS[kernel](r, width)
        assert (error.abs() < 4.5 * cosines.std(dim=0) / math.sqrt(features)).all()


def test_gaussian_frequencies_are_normal_and_inverse_multiquadric_ones_have_heavier_tails():
    """Given its scalar g a frequency is Gaussian, so its kurtosis is 3 E g^4 / (E g^2)^2 = 9."""
    gaussian = GaussianKernel(0.5).frequencies(4000, 3, torch.Generator().manual_seed(2)).double()
    assert kstest(gaussian.flatten().numpy(), norm(scale=2).cdf).pvalue > 0.01
    frequencies = InverseMultiquadricKernel(1.0).frequencies(200_000, 2, torch.Generator().manual_seed(3)).double()
    kurtosis = frequencies.pow(4).mean(0) / frequencies.square().mean(0).square()
    assert ((kurtosis - 9).abs() < 1).all()


def test_weights_begin_at_the_initial_weight():
    image, text = image_features(5), text_features(5)
    linear = "head.alpha=[1,0]", "head.weights=positive"
    paper, ours = (
        build_head("wpse", *linear, f"head.initial_weight={weight}")(image, text).image_to_text.dense()
        for weight in ("null", "1.0")
    )
    # Raw weights of about 1 change a weight of 50 by 0.25, and one of 1 by 1 %.
    assert (paper.norm() / ours.norm()).item() == pytest.approx(50.0**2, rel=0.05)
    # Signed weights from 1 are all close to it.
    signed = build_head("wpse", "head.alpha=[1,0]", "head.initial_weight=1.0")(image, text).image_to_text.dense()
    torch.testing.assert_close(signed, ours, rtol=0.1, atol=0.1 * ours.abs().max().item())
    for weights in ("signed", "positive"):
        with pytest.raises(ConfigError, match="initial_weight"):
            build_head("wpse", f"head.weights={weights}", "head.initial_weight=200.0")
