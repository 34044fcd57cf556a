"""Moving-average estimator of SogCLR, iSogCLR and NUCLR, in the log domain.

A global contrastive loss contains the log of a sum over all n samples. Its gradient divides the terms of a batch by
this sum, which is tracked for every anchor as a moving average u of batch estimates (SogCLR, Yuan et al. 2022). At
tau = 0.01 exp(. / tau) overflows fp32, log u does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from clipzoo.heads.base import Head
from clipzoo.objectives.per_sample import IMAGE, NEVER, TEXT, PerSampleObjective
from clipzoo.objectives.requirements import plain_cosines
from clipzoo.objectives.sample_rows import SampleRows
from clipzoo.types import Loss, Negatives, Scores, Share, Similarity, World


class MovingAverageObjective(PerSampleObjective):
    """Base class with log u of every anchor of both modalities.

    gamma: weight of a batch estimate in u; the first estimate has weight 1. initial: further state of the subclass.
    """

    own_temperature = True
    needs_negatives = True
    value_log = "objective"
    log_u: Tensor

    def __init__(self, gamma: Share, **initial: float) -> None:
        super().__init__(log_u=NEVER, **initial)
        self._gamma = gamma

    def check(self, head: Head) -> list[str]:
        return plain_cosines(head, self.name)

    def track(self, modality: int, samples: SampleRows, log_estimates: Tensor, world: World) -> Tensor:
        """Log batch estimates of local anchors, [b] -> log u of all ranks' anchors, [N], stored in training mode."""
        log_new = world.gather(log_estimates)
        log_old = samples.read(self.log_u)[modality].to(log_new.dtype)
        log_u = torch.where(log_old == NEVER, log_new, _log_blend(log_old, log_new, self._gamma))
        if self.training:
            samples.write(self.log_u, modality, log_u)
        return log_u

    def only_seen(self, name: str, values: Tensor) -> dict[str, Tensor]:
        """[2, n] -> {name_image, name_text}, [n] each, nan for unseen samples."""
        seen = values.masked_fill(self.log_u == NEVER, math.nan)
        return {f"{name}_image": seen[IMAGE], f"{name}_text": seen[TEXT]}


def both_anchors(
    similarity: Similarity,
    negatives: Callable[[int, Scores], Negatives],
    direction: Callable[[int, slice, Negatives], tuple[Tensor, Tensor]],
) -> Loss:
    """Return the sum of the losses of image anchors and of text anchors.

    negatives: function of the anchors' modality and scores.
    direction: function of the anchors' modality, their rows among those of all ranks, and their negatives -> surrogate
        loss and value of the objective.
    """
    terms = [negatives(anchor, scores) for anchor, scores in zip((IMAGE, TEXT), similarity.directions, strict=True)]
    rows = _local_rows(similarity.image_to_text)
    image_loss, image_objective = direction(IMAGE, rows, terms[IMAGE])
    text_loss, text_objective = direction(TEXT, rows, terms[TEXT])
    logs = {
        "objective": image_objective + text_objective,
        "objective_image_anchors": image_objective,
        "objective_text_anchors": text_objective,
    }
    return Loss(image_loss + text_loss, logs)


def _local_rows(scores: Scores) -> slice:
    """Return the rows of this rank's anchors among those of all ranks."""
    return slice(scores.first_positive, scores.first_positive + len(scores.positives()))


def _log_blend(log_old: Tensor, log_new: Tensor, weight: float) -> Tensor:
    """log( (1 - weight) old + weight new )."""
    if weight == 1:
        return log_new
    return torch.logaddexp(log_old + math.log1p(-weight), log_new + math.log(weight))
