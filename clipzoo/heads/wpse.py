"""WPSE: weighted point sets compared by a kernel through random Fourier features (Uesaka et al. 2025)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from numpy.random import SeedSequence
from torch import Generator, Tensor, nn

from clipzoo.heads.base import Paper, ScoreParts
from clipzoo.heads.cost import FLOAT, Cost, Shape, cost_of_vectors
from clipzoo.heads.points import TokenPoints, weighted_sum
from clipzoo.heads.vector import VectorHead
from clipzoo.ops.features import pooled_waves
from clipzoo.types import Count, Features, Part, Positive, Range, Scale, Seed, Weight, checked

# Shift-invariant kernels: exact values, and random frequencies of their Fourier features.


class Kernel(Part, ABC):
    """k(u, v), a function of |u - v| with k(u, u) = 1."""

    @abstractmethod
    def value(self, squared_distance: Tensor) -> Tensor:
        """|u - v|^2 -> k(u, v), elementwise."""

    @abstractmethod
    def frequencies(self, features: int, dimensions: int, generator: Generator) -> Tensor:
        """Draw omega from the spectral distribution, [D, d] float32: E cos(omega . (u - v)) = k(u, v)."""


@checked
class GaussianKernel(Kernel):
    """exp(-r^2 / 2 width^2); omega ~ N(0, width^-2).

    width: width of the kernel, in the units of the distance r.
    """

    def __init__(self, width: Scale) -> None:
        self._width = width

    def value(self, squared_distance: Tensor) -> Tensor:
        return torch.exp(-squared_distance / (2 * self._width**2))

    def frequencies(self, features: int, dimensions: int, generator: Generator) -> Tensor:
        return _normal(features, dimensions, generator) / self._width


@checked
class InverseMultiquadricKernel(Kernel):
    """width / sqrt(width^2 + r^2); omega = (g / width) h, g ~ N(0, 1) and h ~ N(0, I) for every feature.

    The kernel is a mixture of Gaussian kernels of width `width / |g|`, since E exp(-t g^2) = (1 + 2 t)^-1/2. Sampling
    is therefore exact in any dimension and needs no tabulated Bessel density, as in WPSE's released code.

    width: width of the kernel, in the units of the distance r.
    """

    def __init__(self, width: Scale) -> None:
        self._width = width

    def value(self, squared_distance: Tensor) -> Tensor:
        return (1 + squared_distance / self._width**2).rsqrt()

    def frequencies(self, features: int, dimensions: int, generator: Generator) -> Tensor:
        return _normal(features, 1, generator) / self._width * _normal(features, dimensions, generator)


def _normal(rows: int, columns: int, generator: Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator, device="cpu", dtype=torch.float32)


_ACTIVATIONS = {"signed": torch.tanh, "positive": torch.sigmoid}


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
    initial_weight: positive weights where the raw weight is 0; null: half of the bound, whose square multiplies all
        scores at the start.
    """

    needs_tokens = True
    learnable_temperature = True
    citations = (
        Paper(
            "wpse",
            "Weighted Point Set Embedding for Multimodal Contrastive Learning Toward Optimal Similarity Metric",
            "Uesaka, Toshimitsu and Suzuki, Taiji and Takida, Yuhta and Lai, Chieh-Hsin and Murata, Naoki and "
            "Mitsufuji, Yuki",
            "International Conference on Learning Representations",
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
        "initial_weight is None or (weights == 'positive' and initial_weight < weight_bound)": (
            "signed weights begin at 0, and positive ones stay below weight_bound: give weights=positive and a smaller "
            "initial_weight, or null"
        ),
    }

    @classmethod
    def cost(cls, shape: Shape) -> Cost:
        """Token projections, random features (forward, recomputed, gradient), then a product at width d + D."""
        tokens = shape.image_points * shape.image_width + shape.text_points * shape.text_width
        points = shape.image_points + shape.text_points
        project = 6 * shape.local * tokens * shape.width
        waves = 6 * shape.local * points * shape.width * shape.features
        held = 2 * shape.local * points * shape.width * FLOAT
        return cost_of_vectors(shape, shape.width + shape.features, project + waves, held)

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
        self.image = TokenPoints(image_width, embed_width, "head.image_points", image_points, padding=False)
        self.text = TokenPoints(text_width, embed_width, "head.text_points", None, padding=self.needs_padding)
        self.scale = nn.Parameter(torch.tensor(1 / temperature))
        self._alpha = alpha
        self._kernel = kernel
        self._features = {True: features, False: evaluation_features}
        self._activation = _ACTIVATIONS[weights]
        self._weight_bound = weight_bound
        # Added to raw weights, in units of the bound: raw weight 0 then gives the initial weight.
        self._weight_shift = (
            0.0 if initial_weight is None else math.log(initial_weight / (weight_bound - initial_weight))
        )
        self._mean = reduction == "mean"
        self._scale_range = min_scale, max_scale
        self._embed_width = embed_width
        self._seed = seed
        # Buffers, to move with the head; not saved, because a draw is a function of seed and index.
        self.register_buffer("frequencies", torch.empty(0, embed_width), persistent=False)
        self.register_buffer("phases", torch.empty(0), persistent=False)
        self.resample(0)

    @property
    def score_range(self) -> tuple[float, float]:
        if not self._mean:
            return -math.inf, math.inf
        # |v| = 1 and |z(v)|^2 <= 2.
        bound = self._scale_range[1] * self._weight_bound**2 * (self._alpha[0] + 2 * self._alpha[1])
        return -bound, bound

    def embed_image(self, features: Features) -> Tensor:
        return self._embed(self.image, features)

    def embed_text(self, features: Features) -> Tensor:
        return self._embed(self.text, features)

    def factors(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale * image, text

    def ensemble(self, prompts: Tensor) -> Tensor:
        """[p, d + D] -> [1, d + D], the mean; embeddings are not normalised."""
        return prompts.mean(dim=0, keepdim=True)

    def probe(self, features: Features, where: str) -> Tensor:
        """Before the projection: the weighted sum of the tokens, without random features."""
        if where == "after":
            return self.embed_image(features)
        tokens, present = self.image.select(features)
        return weighted_sum(self._weights(self.image, tokens, present), tokens)

    def score_parts(self, image: Features, text: Features) -> ScoreParts:
        """scale * w_i w'_j (a1 <v_i, u_j> + a2 <z(v_i), z(u_j)>), the terms of eq. 8."""
        (left, left_weights), (right, right_weights) = self._points(self.image, image), self._points(self.text, text)
        linear, nonlinear = self._alpha
        kernel = linear * (left @ right.mT)  # [b, M, L]
        if nonlinear > 0:
            waves = [torch.cos(points @ self.frequencies.mT + self.phases) for points in (left, right)]
            kernel = kernel + 2 * nonlinear / len(self.phases) * (waves[0] @ waves[1].mT)
        values = self.scale * left_weights[:, :, None] * right_weights[:, None] * kernel
        return ScoreParts(values, left_weights, right_weights)

    def resample(self, index: int) -> None:
        if not self.stochastic:
            return
        entropy = SeedSequence([self._seed, int(self.training), index]).generate_state(1, "uint64")
        # Drawn on the CPU: equal numbers on all devices and ranks.
        generator = torch.Generator("cpu").manual_seed(int(entropy[0]))
        frequencies = self._kernel.frequencies(self._features[self.training], self._embed_width, generator)
        phases = 2 * math.pi * torch.rand(len(frequencies), generator=generator, device="cpu")
        self.frequencies = _to_device_of(frequencies, self.frequencies)
        self.phases = _to_device_of(phases, self.phases)

    def train(self, mode: bool = True) -> WpseHead:
        """Draw number 0 when the mode changes: evaluation does not depend on the training step."""
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

    def _embed(self, side: TokenPoints, features: Features) -> Tensor:
        """Return embeddings [b, d + D]; a part of weight zero is left out."""
        points, weights = self._points(side, features)
        linear, nonlinear = self._alpha
        parts = []
        if linear > 0:
            parts.append(math.sqrt(linear) * weighted_sum(weights, points))
        if nonlinear > 0:
            waves = pooled_waves(points, weights, self.frequencies, self.phases)
            parts.append(math.sqrt(2 * nonlinear / len(self.phases)) * waves)
        return torch.cat(parts, dim=1)

    def _points(self, side: TokenPoints, features: Features) -> tuple[Tensor, Tensor]:
        """Return the points [b, M, d] and their weights [b, M]."""
        tokens, present = side.select(features)
        return side.points(tokens), self._weights(side, tokens, present)

    def _weights(self, side: TokenPoints, tokens: Tensor, present: Tensor) -> Tensor:
        """Return the weights [b, M], zero for padding; divided by the number of points if the reduction is a mean."""
        weights = self._weight_bound * self._activation(
            side.raw_weights(tokens) / self._weight_bound + self._weight_shift
        )
        weights = weights.masked_fill(~present, 0.0)
        # Without points the mean is zero, like the sum.
        return weights / present.sum(dim=1, keepdim=True).clamp(min=1) if self._mean else weights


def _to_device_of(values: Tensor, like: Tensor) -> Tensor:
    """Convert to the device and type of `like`, without waiting for the GPU to finish the previous step."""
    pinned = values.pin_memory() if like.is_cuda else values
    return pinned.to(like, non_blocking=True)
