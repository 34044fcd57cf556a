"""FLAIR's loss: text-conditioned and multi-positive sigmoid losses (Xiao et al. 2025)."""

from __future__ import annotations

import torch
from numpy.random import SeedSequence
from torch import Tensor, nn
from torch.nn import functional

from clipzoo.objectives.base import LogitScale, Objective
from clipzoo.objectives.siglip import SigLIP
from clipzoo.types import Batch, Bias, Loss, Positive, Progress, Scale, Scores, Seed, Similarity, checked


@checked
class Flair(Objective):
    """Mean of two sigmoid losses with scale t and a bias: the text-conditioned one and the multi-positive one.

    Text-conditioned: an image with its own k captions and, in each step, one random caption of every other image; the
    sum over the pairs of N images / (k + N - 1). Multi-positive: the pooled image (`Similarity.further`) with all
    captions; the sum over the pairs / (k N). Heads without the second have only the first.

    initial_scale, max_scale: initial value and bound of the learnable t. initial_bias: initial value of the bias.
    seed: seeds the random captions, which are a function of seed, step and the places of both images in the batch.
    """

    name = "flair"
    loss_unit = "nats"
    own_temperature = True
    one_positive = False
    pair = staticmethod(SigLIP.pair)

    def __init__(self, initial_scale: Scale, max_scale: Positive, initial_bias: Bias, seed: Seed) -> None:
        super().__init__()
        self.scale = LogitScale(initial_scale, learnable=True, maximum=max_scale)
        self.bias = nn.Parameter(torch.tensor(float(initial_bias)))
        self._seed = seed

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        scale = self.scale()
        columns, positive = selected_captions(batch, similarity, self._seed, progress.step)
        conditioned = conditioned_loss(similarity.image_to_text, columns, positive, scale, self.bias)
        losses = {"loss_conditioned": similarity.world.size * conditioned}
        if similarity.further:
            pooled = [scores.binary_cross_entropy(scale, self.bias) for scores in similarity.further]
            losses["loss_multi_positive"] = torch.stack(pooled).mean() / batch.views.captions
        logs = {**losses, "logit_scale": scale, "logit_bias": self.bias}
        total = torch.stack(list(losses.values())).mean()
        return Loss(total, {name: value.detach() for name, value in logs.items()})


def conditioned_loss(scores: Scores, columns: Tensor, positive: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """columns [b, S] and whether they are positives -> the sum over the pairs of the sigmoid loss / S."""
    logits = scale * scores.at(columns) + bias
    return -functional.logsigmoid(torch.where(positive, logits, -logits)).sum() / columns.shape[1]


def selected_captions(batch: Batch, similarity: Similarity, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return columns [b, K + N - 1] and which are positives: all texts of the own image, one caption of the others.

    Each rank draws the same numbers for a pair of images, and so do ranks of any number: a random multiple of a random
    number for each image, whose upper bits are nearly independent between pairs.
    """
    views, device = batch.views, batch.sample_id.device
    texts, images = views.captions + views.hard, len(batch) * similarity.world.size
    entropy = SeedSequence([seed, step]).generate_state(1, "uint64")
    generator = torch.Generator().manual_seed(int(entropy[0]))
    rows, others = torch.randint(2**62, (2, images), generator=generator).to(device, non_blocking=True)
    local = similarity.world.rank * len(batch) + torch.arange(len(batch), device=device)
    drawn = ((rows[local, None] | 1) * others >> 33 & (2**30 - 1)) % views.captions  # [b, N]
    image = torch.arange(images - 1, device=device)
    image = image + (image >= local[:, None])  # [b, N - 1], without the own image
    captions = texts * local[:, None] + torch.arange(texts, device=device)
    columns = torch.cat([captions, texts * image + drawn.gather(1, image)], dim=1)
    positive = torch.arange(columns.shape[1], device=device) < views.captions
    return columns, positive.expand_as(columns)
