"""WPSE: weighted point sets compared by a kernel through random Fourier features (Uesaka et al. 2025)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from numpy.random import SeedSequence
from torch import Tensor, nn

from clipzoo.errors import ConfigError
from clipzoo.heads.kernels import Kernel
from clipzoo.heads.points import TokenPoints, weighted_sum
from clipzoo.heads.vector import VectorHead
from clipzoo.ops.random_features import pooled_waves
from clipzoo.types import Count, Features, Positive

_ACTIVATIONS = {"signed": torch.tanh, "positive": torch.sigmoid}


class WpseHead(VectorHead):
    """logits = scale * <e_x, e_y>, e = [sqrt(a1) mean_i w_i v_i, sqrt(a2) mean_i w_i z(v_i)] (eq. 8), not normalised.

    z(v) = sqrt(2 / D) cos(v Omega^T + phases), new Omega and phases each step, one fixed draw in evaluation.

    image_width, text_width: widths of the tokens. embed_width: d.
    alpha: (a1, a2), the shares of the linear and of the nonlinear kernel; (1, 0) draws nothing at all.
    kernel: the nonlinear one. features, evaluation_features: D in training and in evaluation.
    weights: signed, bound * tanh(a / bound), or positive, bound * sigmoid(a / bound). weight_bound: the bound.
    reduction: mean over the points, as the released code and its numbers have it, or sum, as eq. 6 prints it.
    image_points: only the first so many image tokens; null: all.
    text_points: all positions, padding too, or those of the caption. The mean is then over the caption's points, so
        that an embedding depends neither on the padding nor, in its scale, on the caption's length.
    temperature: initial 1 / scale. The scale has no exponential and is clamped to [min_scale, max_scale].
    seed: of the random features.
    """

    needs_tokens = True
    learnable_temperature = True
    published_with = ("infonce",)
    frequencies: Tensor
    phases: Tensor

    def __init__(
        self,
        image_width: int,
        text_width: int,
        embed_width: Count,
        alpha: tuple[float, float],
        kernel: Kernel,
        features: Count,
        evaluation_features: Count,
        weights: Literal["signed", "positive"],
        weight_bound: Positive,
        reduction: Literal["mean", "sum"],
        image_points: Count | None,
        text_points: Literal["all", "caption"],
        temperature: Positive,
        min_scale: float,
        max_scale: float,
        seed: int,
    ) -> None:
        super().__init__()
        if min(alpha) < 0 or sum(alpha) == 0:
            raise ConfigError(f"head.alpha is {list(alpha)}: neither share may be negative, nor both zero")
        if not 0 < min_scale <= 1 / temperature <= max_scale:
            raise ConfigError(
                f"head.temperature={temperature} starts the scale at {1 / temperature:g}, and each step clamps it "
                f"to between head.min_scale={min_scale:g} and head.max_scale={max_scale:g}, both above 0: change one"
            )
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
        self._mean = reduction == "mean"
        self._scale_range = min_scale, max_scale
        self._embed_width = embed_width
        self._seed = seed
        # Buffers only to follow the head to its device: a draw is a function of seed and index, so none is saved.
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
        """[p, d + D] -> [1, d + D], the mean: nothing is normalised."""
        return prompts.mean(dim=0, keepdim=True)

    def probe(self, features: Features, where: str) -> Tensor:
        """Before the projection: the tokens' own mean under the learned weights, without random features."""
        if where == "after":
            return self.embed_image(features)
        tokens, present = self.image.select(features)
        return weighted_sum(self._weights(self.image, tokens, present), tokens)

    def resample(self, index: int) -> None:
        if not self.stochastic:
            return
        entropy = SeedSequence([self._seed, int(self.training), index]).generate_state(1, "uint64")
        # Drawn on the CPU, so that every device and every rank has the same numbers.
        generator = torch.Generator("cpu").manual_seed(int(entropy[0]))
        frequencies = self._kernel.frequencies(self._features[self.training], self._embed_width, generator)
        phases = 2 * math.pi * torch.rand(len(frequencies), generator=generator, device="cpu")
        self.frequencies = _sent(frequencies, self.frequencies)
        self.phases = _sent(phases, self.phases)

    def train(self, mode: bool = True) -> WpseHead:
        """Entering a mode starts from its draw 0: evaluation is then the same wherever training stands."""
        entered = mode != self.training
        super().train(mode)
        if entered:
            self.resample(0)
        return self

    @torch.no_grad()
    def clamp_(self) -> None:
        self.scale.clamp_(*self._scale_range)

    def logs(self) -> Mapping[str, Tensor]:
        return {"temperature": 1 / self.scale.detach()}

    def _embed(self, side: TokenPoints, features: Features) -> Tensor:
        """-> [b, d + D], or the one part whose share is not zero."""
        tokens, present = side.select(features)
        points, weights = side.points(tokens), self._weights(side, tokens, present)
        linear, nonlinear = self._alpha
        parts = []
        if linear > 0:
            parts.append(math.sqrt(linear) * weighted_sum(weights, points))
        if nonlinear > 0:
            waves = pooled_waves(points, weights, self.frequencies, self.phases)
            parts.append(math.sqrt(2 * nonlinear / len(self.phases)) * waves)
        return torch.cat(parts, dim=1)

    def _weights(self, side: TokenPoints, tokens: Tensor, present: Tensor) -> Tensor:
        """[b, M], zero where there is no point; divided by the number of points where the reduction is a mean."""
        weights = self._weight_bound * self._activation(side.raw_weights(tokens) / self._weight_bound)
        weights = weights.masked_fill(~present, 0.0)
        # Of no points at all the mean is zero, as the sum is.
        return weights / present.sum(dim=1, keepdim=True).clamp(min=1) if self._mean else weights


def _sent(drawn: Tensor, like: Tensor) -> Tensor:
    """With the device and type of `like`. The host does not wait for a GPU to finish the step before."""
    pinned = drawn.pin_memory() if like.is_cuda else drawn
    return pinned.to(like, non_blocking=True)
