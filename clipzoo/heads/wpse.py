"""WPSE: weighted point sets compared by a kernel through random Fourier features (Uesaka et al. 2025)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal

import torch
from numpy.random import SeedSequence
from torch import Generator, Tensor, nn
from torch.autograd.function import once_differentiable

from clipzoo.heads.base import FLOAT, ICLR, Cost, Paper, ScoreParts, Shape, cost_of_vectors, projections
from clipzoo.heads.points import TokenPoints, weighted_sum
from clipzoo.heads.vector import VectorHead
from clipzoo.ops.tiles import product
from clipzoo.types import Count, Features, Part, Positive, Range, Scale, Seed, Weight, checked


@checked
class WpseHead(VectorHead):
    """logits = scale * <e_x, e_y>, e = [sqrt(a1) mean_i w_i v_i, sqrt(a2) mean_i w_i z(v_i)] (eq. 8), not normalised.

    z(v) = sqrt(2 / D) cos(v Omega^T + phases), with new Omega and phases in every step and a fixed draw in evaluation.

    image_width, text_width: widths of the tokens. embed_width: d.
    alpha: (a1, a2), weights of the linear and of the nonlinear kernel; (1, 0) has no random features.
    kernel: the nonlinear kernel. features, evaluation_features: D in training and in evaluation.
    weights: "signed", bound * tanh(a / bound), or "positive", bound * sigmoid(a / bound). weight_bound: the bound.
    reduction: "mean" over the points, as in the released code and its results, or "sum", as in eq. 6.
    image_points: number of leading image tokens that are points; null: all.
    text_points: "all" positions, including padding, or those of the "caption". With "caption" the mean is over
        the caption's points, so an embedding depends neither on padding nor, in its scale, on the caption's length.
    temperature: initial 1 / scale. The scale has no exponential and is clamped to [min_scale, max_scale].
    seed: seed of the random features.
    initial_weight: value of the weights at raw weight 0; null: 0, and half of the bound for positive ones. Signed
        weights begin near a value: their projection is divided by the bound. Its square multiplies all scores at first.
    """

    needs_tokens = True
    learnable_temperature = True
    citations = (
        Paper(
            "wpse",
            "Weighted Point Set Embedding for Multimodal Contrastive Learning Toward Optimal Similarity Metric",
            "Uesaka, Toshimitsu and Suzuki, Taiji and Takida, Yuhta and Lai, Chieh-Hsin and Murata, Naoki and "
            "Mitsufuji, Yuki",
            ICLR,
            2025,
        ),
    )
    published_with = ("infonce",)
    frequencies: Tensor
    phases: Tensor

    relations = {
        "sum(alpha) > 0": "one of the two weights must be above 0",
        "at_most(min_scale, 1 / temperature) and at_most(1 / temperature, max_scale)": (
            "the initial scale 1 / temperature must lie between min_scale and max_scale: change one of them"
        ),
        "initial_weight is None or initial_weight < weight_bound": (
            "weights stay below weight_bound: give a smaller initial_weight, or null"
        ),
    }

    @classmethod
    def cost(cls, shape: Shape) -> Cost:
        """Token projections, random features (forward, recomputed, gradient), then a product at width d + D."""
        points = shape.local * (shape.image_points + shape.text_points)
        flops = projections(shape, shape.image_points, shape.text_points) + 6 * points * shape.width * shape.features
        return cost_of_vectors(shape, shape.width + shape.features, flops, 2 * points * shape.width * FLOAT)

    def __init__(
        self,
        image_width: Count,
        text_width: Count,
        embed_width: Count,
        alpha: tuple[Weight, Weight],
        kernel: Kernel,
        features: Count,
        evaluation_features: Count,
        weights: Literal["signed", "positive"],
        weight_bound: Annotated[float, Range(at_least=1e-3, at_most=1e6)],
        reduction: Literal["mean", "sum"],
        image_points: Count | None,
        text_points: Literal["all", "caption"],
        temperature: Scale,
        min_scale: Positive,
        max_scale: Positive,
        seed: Seed,
        initial_weight: Positive | None = None,
    ) -> None:
        super().__init__()
        self.needs_padding = text_points == "all"
        self.stochastic = alpha[1] > 0
        self.image = TokenPoints(image_width, embed_width, image_points, padding=False)
        self.text = TokenPoints(text_width, embed_width, None, padding=self.needs_padding)
        self.scale = nn.Parameter(torch.tensor(1 / temperature))
        self._alpha, self._kernel, self._seed, self._embed_width = alpha, kernel, seed, embed_width
        self._features = {True: features, False: evaluation_features}
        self._activation = torch.tanh if weights == "signed" else torch.sigmoid
        self._weight_bound, self._mean = weight_bound, reduction == "mean"
        # Added to raw weights, in units of the bound: raw weight 0 then gives the initial weight.
        if weights == "signed":
            self._weight_shift = math.atanh((initial_weight or 0.0) / weight_bound)
            if initial_weight:
                # Weights that scatter at the start slow short runs: docs/benchmarks/hands.md.
                for side in (self.image, self.text):
                    side.weight_projection.data.mul_(1 / weight_bound)
        else:
            initial = initial_weight or weight_bound / 2
            self._weight_shift = math.log(initial / (weight_bound - initial))
        # |v| = 1 and |z(v)|^2 <= 2.
        bound = max_scale * weight_bound**2 * (alpha[0] + 2 * alpha[1]) if self._mean else math.inf
        self.score_range = -bound, bound
        self._scale_range = min_scale, max_scale
        # Buffers, to move with the head; not saved, because a draw is a function of seed and index.
        self.register_buffer("frequencies", torch.empty(0, embed_width), persistent=False)
        self.register_buffer("phases", torch.empty(0), persistent=False)
        self.resample(0)

    def embed_image(self, features: Features) -> Tensor:
        return self._embed(self.image, features)

    def embed_text(self, features: Features) -> Tensor:
        return self._embed(self.text, features)

    def _embed(self, side: TokenPoints, features: Features) -> Tensor:
        """Return embeddings [b, d + D]; a part of weight zero is left out."""
        tokens, weights = self._weighted(side, features)
        points = side.points(tokens)
        linear, nonlinear = self._alpha
        parts = []
        if linear > 0:
            parts.append(math.sqrt(linear) * weighted_sum(weights, points))
        if nonlinear > 0:
            waves = pooled_waves(points, weights, self.frequencies, self.phases)
            parts.append(math.sqrt(2 * nonlinear / len(self.phases)) * waves)
        return torch.cat(parts, dim=1)

    def _weighted(self, side: TokenPoints, features: Features) -> tuple[Tensor, Tensor]:
        """Return the tokens [b, M, w] and the weights of their points [b, M], zero for padding."""
        tokens, raw_weights, present = side.select(features)
        weights = self._weight_bound * self._activation(raw_weights / self._weight_bound + self._weight_shift)
        weights = weights.masked_fill(~present, 0.0)
        # Without points the mean is zero, like the sum.
        return tokens, weights / present.sum(dim=1, keepdim=True).clamp(min=1) if self._mean else weights

    def factors(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale * image, text

    def probe(self, features: Features, where: str) -> Tensor:
        """Before the projection: the weighted sum of the tokens, without random features."""
        if where == "after":
            return self.embed_image(features)
        tokens, weights = self._weighted(self.image, features)
        return weighted_sum(weights, tokens)

    def score_parts(self, image: Features, text: Features) -> ScoreParts:
        """scale * w_i w'_j (a1 <v_i, u_j> + a2 <z(v_i), z(u_j)>), the terms of eq. 8."""
        image_tokens, image_weights = self._weighted(self.image, image)
        text_tokens, text_weights = self._weighted(self.text, text)
        left, right = self.image.points(image_tokens), self.text.points(text_tokens)
        linear, nonlinear = self._alpha
        kernel = linear * (left @ right.mT)  # [b, M, L]
        if nonlinear > 0:
            waves = [torch.cos(points @ self.frequencies.mT + self.phases) for points in (left, right)]
            kernel = kernel + 2 * nonlinear / len(self.phases) * (waves[0] @ waves[1].mT)
        values = self.scale * image_weights[:, :, None] * text_weights[:, None] * kernel
        return ScoreParts(values, image_weights, text_weights)

    def resample(self, index: int) -> None:
        if not self.stochastic:
            return
        entropy = SeedSequence([self._seed, int(self.training), index]).generate_state(1, "uint64")
        # Drawn on the CPU: equal numbers on all devices and ranks.
        generator = torch.Generator("cpu").manual_seed(int(entropy[0]))
        frequencies = self._kernel.frequencies(self._features[self.training], self._embed_width, generator)
        phases = 2 * math.pi * torch.rand(len(frequencies), generator=generator, device="cpu")
        for name, values in (("frequencies", frequencies), ("phases", phases)):
            # From pinned memory, numbers are copied without waiting for the GPU to finish the previous step.
            values = values.pin_memory() if self.frequencies.is_cuda else values
            setattr(self, name, values.to(self.frequencies, non_blocking=True))

    def train(self, mode: bool = True) -> WpseHead:
        """Resample with index 0 when the mode changes: evaluation does not depend on the training step."""
        changed = mode != self.training
        super().train(mode)
        if changed:
            self.resample(0)
        return self

    @torch.no_grad()
    def clamp_(self) -> None:
        self.scale.clamp_(*self._scale_range)

    def logs(self) -> Mapping[str, Tensor]:
        return {"temperature": 1 / self.scale.detach()}


# Random Fourier features of weighted points, summed over each sample's points (eq. 8).
#
# The features [b, M, D] of all points would be the largest tensor of the head: they are computed for a few samples at a
# time and recomputed for the gradient. The slow twin is `pooled_waves_reference`.


def pooled_waves_reference(points: Tensor, weights: Tensor, frequencies: Tensor, phases: Tensor) -> Tensor:
    """[b, M, d], [b, M], [D, d], [D] -> sum_i weights_i cos(frequencies . points_i + phases) [b, D]."""
    waves = torch.cos(points @ frequencies.mT + phases)  # [b, M, D]
    return (weights.unsqueeze(1) @ waves).squeeze(1)


ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Number of features in memory at a time: they fit into a CPU's cache, or fill a GPU."""


def pooled_waves(points: Tensor, weights: Tensor, frequencies: Tensor, phases: Tensor) -> Tensor:
    """[b, M, d], [b, M], [D, d], [D] -> sum_i weights_i cos(frequencies . points_i + phases) [b, D].

    Differentiable in points and weights; frequencies and phases are not trained.
    """
    if torch.compiler.is_exporting():
        return pooled_waves_reference(points, weights, frequencies, phases)
    return _PooledWaves.apply(points, weights, frequencies, phases)


class _PooledWaves(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, points: Tensor, weights: Tensor, frequencies: Tensor, phases: Tensor) -> Tensor:
        context.save_for_backward(points, weights, frequencies, phases)
        pooled = points.new_empty(len(points), len(phases))
        for samples, angles in _angles(points, frequencies, phases):
            torch.bmm(weights[samples, None], angles.cos_(), out=pooled[samples, None])
        return pooled

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        points, weights, frequencies, phases = context.saved_tensors
        d_points, d_weights = torch.empty_like(points), torch.empty_like(weights)
        for samples, angles in _angles(points, frequencies, phases):
            pooled_gradient = gradient[samples, None]  # [r, 1, D]
            d_weights[samples] = (angles.cos() @ pooled_gradient.mT).squeeze(2)
            slopes = angles.sin_().mul_(pooled_gradient).mul_(-weights[samples, :, None])
            d_points[samples] = product(slopes.flatten(0, 1), frequencies.mT).view_as(d_points[samples])
        return d_points, d_weights, None, None


def _angles(points: Tensor, frequencies: Tensor, phases: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of samples and the angles [r, M, D] of their points."""
    elements = ELEMENTS["cuda" if points.is_cuda else "cpu"]
    size = max(1, elements // max(1, points.shape[1] * len(phases)))
    for start in range(0, len(points), size):
        samples = slice(start, min(start + size, len(points)))
        angles = product(points[samples].flatten(0, 1), frequencies, phases)
        yield samples, angles.unflatten(0, (-1, points.shape[1]))


# Shift-invariant kernels: exact values, and random frequencies of their Fourier features.


class Kernel(Part, ABC):
    """k(u, v), a function of r = |u - v| with k(u, u) = 1.

    width: width of the kernel, in the units of the distance r.
    """

    def __init__(self, width: Scale) -> None:
        self._width = width

    @abstractmethod
    def value(self, squared_distance: Tensor) -> Tensor:
        """r^2 -> k(u, v), elementwise."""

    @abstractmethod
    def frequencies(self, features: int, dimensions: int, generator: Generator) -> Tensor:
        """Draw omega from the spectral distribution, [D, d] float32: E cos(omega . (u - v)) = k(u, v)."""


@checked
class GaussianKernel(Kernel):
    """exp(-r^2 / 2 width^2); omega ~ N(0, width^-2)."""

    def value(self, squared_distance: Tensor) -> Tensor:
        return torch.exp(-squared_distance / (2 * self._width**2))

    def frequencies(self, features: int, dimensions: int, generator: Generator) -> Tensor:
        return _normal(features, dimensions, generator=generator) / self._width


@checked
class InverseMultiquadricKernel(Kernel):
    """width / sqrt(width^2 + r^2); omega = (g / width) h, g ~ N(0, 1) and h ~ N(0, I) for every feature.

    The kernel is a mixture of Gaussian kernels of width `width / |g|`, since E exp(-t g^2) = (1 + 2 t)^-1/2. Sampling
    is therefore exact in any dimension and needs no tabulated Bessel density, as in WPSE's released code.
    """

    def value(self, squared_distance: Tensor) -> Tensor:
        return (1 + squared_distance / self._width**2).rsqrt()

    def frequencies(self, features: int, dimensions: int, generator: Generator) -> Tensor:
        scales = _normal(features, 1, generator=generator) / self._width
        return scales * _normal(features, dimensions, generator=generator)


_normal = partial(torch.randn, device="cpu", dtype=torch.float32)
