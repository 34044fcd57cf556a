"""AmorLIP: the sums over negatives of the last epochs, predicted by small networks (Sun et al. 2025)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

from clipzoo.config.vocabulary import Count, Decay, Epochs, Positive, Probability, Rate, Scale, Seed, Share
from clipzoo.errors import ConfigError
from clipzoo.heads.base import FLOAT, Head, Paper, Shape
from clipzoo.objectives.base import LogitScale, Objective
from clipzoo.types import Batch, Loss, Progress, Similarity, World, checked


class FittedObjective(Objective):
    """Base class of objectives that fit a network of the embeddings, by steps of Adam before the model's step.

    In evaluation mode the loss is the objective's value, which needs no network.

    Its weights are buffers, not parameters: the optimizer of the model does not see them, and a checkpoint holds
    them with Adam's moments. Ranks average their gradients, and so have the same weights.

    shape: shape of all weights as one tensor.
    width: d of the head; narrower embeddings are padded with zeros.
    fit_steps: steps of Adam in a step of the training. fit_rate: their learning rate.
    """

    own_temperature = True
    needs_negatives = True
    value_log = "objective"
    network: Tensor
    moments: Tensor
    fits: Tensor

    def __init__(self, shape: tuple[int, ...], width: int, fit_steps: int, fit_rate: float) -> None:
        super().__init__()
        self._width, self._fit_steps, self._fit_rate = width, fit_steps, fit_rate
        self.register_buffer("network", torch.zeros(shape))
        self.register_buffer("moments", torch.zeros(2, *shape))
        self.register_buffer("fits", torch.zeros(()))

    def cost(self, shape: Shape, embedding: float, views: float) -> float:
        """The gradient of the network in every step of Adam, as the part of a sample of the global batch."""
        return 2 * FLOAT * self._fit_steps * self.network.numel() / shape.batch

    def restart(self, weights: Tensor) -> None:
        """Set the weights, and begin Adam anew."""
        self.network.copy_(weights, non_blocking=True)
        self.moments.zero_()
        self.fits.zero_()

    def fit(self, loss: Callable[[Tensor], Tensor], world: World) -> None:
        """Minimise a function of the weights: the mean over the local anchors."""
        for _ in range(self._fit_steps):
            weights = self.network.clone().requires_grad_()
            loss(weights).backward()
            assert weights.grad is not None
            gradient = world.mean(weights.grad)
            self.fits += 1
            for moment, value, decay in zip(self.moments, (gradient, gradient.square()), (0.9, 0.999), strict=True):
                moment.lerp_(value, 1 - decay)
            mean, square = self.moments[0] / (1 - 0.9**self.fits), self.moments[1] / (1 - 0.999**self.fits)
            self.network -= self._fit_rate * mean / (square.sqrt() + 1e-8)

    def check(self, head: Head) -> list[str]:
        reasons = super().check(head)
        if not head.is_inner_product:
            name = type(head).__name__
            reasons.append(f"objective {self.name} reads vectors, and head {name} has none: use head=cosine")
        return reasons

    def embeddings(self, similarity: Similarity) -> Tensor:
        """Return the local embeddings of images and texts without gradient, padded with zeros, [2, b, width]."""
        image, text = similarity.image, similarity.text
        if not (isinstance(image, Tensor) and isinstance(text, Tensor)):
            raise ConfigError(f"objective {self.name} reads vectors, and this similarity has none: use head=cosine")
        missing = self._width - image.shape[1]
        if missing < 0:
            raise ConfigError(f"embeddings of width {image.shape[1]}: set objective.width={image.shape[1]}")
        return functional.pad(torch.stack([image, text]).detach(), (0, missing)).to(self.network.dtype)


@checked
class AmorLIP(FittedObjective):
    """(-2 mean_i S_ii + sum over the directions of mean_i E_i / lambda_i) / scale + rho / scale, S = scale * cosine.

    E_i = sum_{j != i} e^{S_ij} + p e^{S_ii}; lambda_i = beta lambda_prev(x_i) + (1 - beta) E_i, without gradient, and
    so is the first divisor. lambda_prev is the average of the network's weights at the end of the last epoch. A
    network for each modality is fitted to log lambda_i, and restarts in every epoch.

    temperature: initial value of 1 / scale, which is learned. max_scale: upper bound of the scale.
    positive_weight: p, weight of the positive in the sums.
    rho: weight of the scale's term. rho_share: share of the training after which rho changes its sign.
    beta: weight of the prediction, reached from 0 by half a cosine. beta_epochs: epochs until beta is reached.
    average_decay: decay of the average of the network's weights. average_every: steps between its updates.
    hidden_factor: hidden width divided by d. seed: seed of the networks' initial weights.
    """

    name = "amorlip"
    citations = (
        Paper(
            "amorlip",
            "AmorLIP: Efficient Language-Image Pretraining via Amortization",
            "Sun, Haotian and others",
            year=2025,
        ),
    )
    depends_on_length = True
    average: Tensor
    previous: Tensor

    relations = {"at_most(1 / temperature, max_scale)": "the scale 1 / temperature must not exceed its bound max_scale"}

    def __init__(
        self, temperature: Scale, max_scale: Positive, positive_weight: Share, rho: float, rho_share: Probability,
        beta: Decay, beta_epochs: Epochs, average_decay: Decay, average_every: Count, width: Count,
        hidden_factor: Count, fit_steps: Count, fit_rate: Rate, seed: Seed,
    ) -> None:  # fmt: skip
        self._hidden = hidden_factor * width
        self._shapes = [parameter.shape for parameter in layers(width, self._hidden)]
        self._sizes = [shape.numel() for shape in self._shapes]
        super().__init__((2, sum(self._sizes)), width, fit_steps, fit_rate)
        self.scale = LogitScale(1 / temperature, True, max_scale)
        self.register_buffer("average", torch.zeros_like(self.network))
        self.register_buffer("previous", torch.zeros_like(self.network))
        self._log_positive_weight, self._rho, self._rho_share = math.log(positive_weight), rho, rho_share
        self._beta, self._beta_epochs, self._seed = beta, beta_epochs, seed
        self._average_decay, self._average_every = average_decay, average_every

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        epoch, scale = progress.completed(), self.scale()
        both = [scores.scaled(scale.mul) for scores in similarity.directions]
        positives = torch.stack([scores.positives() for scores in both])  # [2, b]
        negatives = torch.stack([scores.log_sum_exp(exclude_positive=True) for scores in both])
        log_sums = torch.logaddexp(negatives, positives + self._log_positive_weight)
        value = (log_sums - positives).mean(dim=1).sum() / scale.detach()
        logs = {"objective": value.detach(), "logit_scale": scale.detach()}
        if not self.training:
            return Loss(value, logs)

        features, log_lambda = self.embeddings(similarity), log_sums.detach()
        if progress.begins_epoch:
            self.previous.copy_(self.average)
            self.restart(self.first_weights(epoch))
            self.average.copy_(self.network)
        beta = self._beta * (1 - math.cos(math.pi * min(1.0, epoch / self._beta_epochs))) / 2
        if beta > 0:
            predicted = self.predict(self.previous, features)
            log_lambda = torch.logaddexp(predicted + math.log(beta), log_lambda + math.log1p(-beta))

        def squared_error(weights: Tensor) -> Tensor:
            return (self.predict(weights, features) - log_lambda).square().mean(dim=1).sum()

        self.fit(squared_error, similarity.world)
        if (progress.step + 1) % self._average_every == 0:
            self.average.lerp_(self.network, 1 - self._average_decay)
        contrast = ((log_sums - log_lambda).exp() - positives).mean(dim=1).sum()
        rho = self._rho if progress.step < self._rho_share * progress.total_steps else -self._rho
        return Loss(contrast / scale.detach() + rho / scale, logs)

    def first_weights(self, epoch: int) -> Tensor:
        """Return the weights at the start of an epoch, [2, P]: torch's initialization."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed + epoch)
            return torch.stack([parameters_to_vector(layers(self._width, self._hidden)) for _ in range(2)]).detach()

    def predict(self, weights: Tensor, features: Tensor) -> Tensor:
        """Weights [2, P] and embeddings [2, b, width] of both modalities -> log lambda, [2, b]."""
        outputs = []
        for row, inputs in zip(weights, features, strict=True):
            parts = [part.view(shape) for part, shape in zip(row.split(self._sizes), self._shapes, strict=True)]
            hidden = inputs
            for weight, bias, norm_weight, norm_bias in (parts[:4], parts[4:8]):
                hidden = functional.linear(hidden, weight, bias).relu()
                hidden = functional.layer_norm(hidden, bias.shape, norm_weight, norm_bias)
            outputs.append(functional.linear((hidden + inputs).relu(), *parts[8:])[:, 0])
        return torch.stack(outputs)


def layers(width: int, hidden: int) -> list[nn.Parameter]:
    """Return the parameters of a network: two linear layers, each with a norm, and a linear layer to one number."""
    norms = nn.LayerNorm(hidden), nn.LayerNorm(width)
    modules = nn.Linear(width, hidden), norms[0], nn.Linear(hidden, width), norms[1], nn.Linear(width, 1)
    return [parameter for module in modules for parameter in module.parameters()]
