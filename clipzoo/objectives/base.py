"""Interface of objectives, their compatibility with heads, and sums over the directions of a similarity."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from clipzoo.config.vocabulary import SameCaption, Weight
from clipzoo.errors import ConfigError
from clipzoo.heads.base import Head, Paper, Shape
from clipzoo.types import Batch, Loss, Progress, Scores, Similarity, Term, Views, World, checked, evaluation_mode

log = logging.getLogger(__name__)
StateShare = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A part of a tensor: the shape of the whole, the first indices of the part, its shape."""


class Objective(nn.Module):
    """Base class of objectives: an objective computes a loss from similarities.

    Per-sample state is held in buffers addressed by sample id. name: the objective's name in conf/objective.
    """

    name: str
    loss_unit = ""
    """Unit of the loss in curves: "nats" for a negative log-likelihood or a bound of mutual information, else empty."""
    own_temperature: bool = False
    """True if the objective scales the scores itself, which must then be plain cosines."""
    needs_negatives: bool = False
    """True if the loss is not defined for a global batch of one sample, which has no negatives."""
    depends_on_length: bool = False
    """True if a step depends on the length of the training, `Progress.total_steps`."""
    value_log = "loss"
    """Log key of the objective's value; not "loss" if the loss is a surrogate, correct only in its gradient."""
    reads_views: bool = False
    """True if the objective reads the raw images and captions of the batch, and not only their similarities."""
    one_positive: bool = True
    """True if the loss is defined only for one positive of each row, and no pair is left out."""
    same_caption: SameCaption = "negative"
    needs_teacher: bool = False
    """True if the loss reads `Similarity.teacher`."""
    citations: tuple[Paper, ...] = ()
    """Papers that define the objective."""

    def __call__(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        """See `forward`. Raises ConfigError for a global batch of one sample if the objective needs negatives."""
        self.require_views(batch.views)
        if self.needs_negatives and similarity.image_to_text.columns < 2:
            raise ConfigError(
                f"objective {self.name} compares a sample with the other samples of its batch, and the global batch "
                "has 1 sample: give it at least 2"
            )
        loss: Loss = super().__call__(similarity, batch, progress)
        for width, prefix in similarity.prefixes.items():
            of_prefix = super().__call__(prefix, batch, progress).total
            loss = Loss(loss.total + of_prefix, {**loss.logs, f"loss_prefix_{width}": of_prefix.detach()})
        return loss

    def require_views(self, views: Views) -> None:
        """Raise ConfigError if the loss is not defined for so many images and texts of a sample."""
        if self.one_positive and views != Views():
            raise ConfigError(
                f"objective {self.name} compares one image and one caption of a sample, and the samples have {views}: "
                "give data.views one caption and nothing else, or use objective=infonce"
            )

    @abstractmethod
    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        """Return the loss of this rank's anchors; its mean over ranks is the loss of the global batch.

        Computed outside autocast, in the precision of the similarity. In training mode the per-sample state is updated.
        """

    def terms(self, similarity: Similarity, batch: Batch, progress: Progress) -> Mapping[str, Term]:
        """Return further parts of the loss by name; each is logged as `term_NAME`."""
        return {}

    def cost(self, shape: Shape, embedding: float, views: float) -> float:
        """Bytes that each other rank receives for a sample in a step, besides those of the head.

        embedding: bytes of a sample's gathered embedding and its gradient. views: bytes of its raw image and caption.
        """
        return 0.0

    def learning_rates(self, progress: Progress) -> Mapping[nn.Parameter, float]:
        """Return the learning rates in the coming step of parameters that do not follow the optimizer's schedule."""
        return {}

    @staticmethod
    def pair(state: Mapping[str, Tensor]) -> tuple[float, float] | None:
        """Return log t and b of a stored objective whose logits of pairs are t * score + b; None for others."""
        return None

    def check(self, head: Head) -> list[str]:
        """Return the reasons why this objective cannot train this head, with the keys to change; empty if it can."""
        reasons = []
        if head.matryoshka and next(self.buffers(), None) is not None:
            reasons.append(
                f"objective {self.name} has one state for each sample or network, and not one for each prefix of "
                "head.matryoshka: use objective=infonce, or head.matryoshka=[]"
            )
        if self.own_temperature and head.learnable_temperature:
            reasons.append(
                f"objective {self.name} has its own temperature, and head {type(head).__name__} learns another: "
                "use head=cosine"
            )
        if self.own_temperature and not has_cosine_range(head):
            low, high = head.score_range
            reasons.append(
                f"objective {self.name} divides cosines in [-1, 1] by its own temperature, and the scores of head "
                f"{type(head).__name__} lie in [{low:g}, {high:g}]: use head=cosine"
            )
        return reasons

    def warnings(self, head: Head) -> list[str]:
        """Return warnings about a compatible pair of head and objective."""
        if self.own_temperature or not has_cosine_range(head):
            return []
        return [
            f"objective {self.name} has no temperature, and head {type(head).__name__} gives it plain cosines, which "
            "are too flat to train well: use head=clip, or give this head a temperature"
        ]

    def allocate(self, samples: int, world: World = World()) -> None:
        """Allocate the per-sample state of a dataset, divided among the ranks. No-op for objectives without state."""

    def initial_state(self, samples: int) -> dict[str, Tensor]:
        """Return the per-sample state of `samples` samples that no batch has set, by name; empty without state."""
        return {}

    @torch.no_grad()
    def value_of_unseen(self, similarity: Similarity, progress: Progress) -> Tensor:
        """Return the objective's value, [], for the N pairs of one rank's batch that are not in the dataset.

        The objective does not change. Such pairs get the initial state, like samples that training sees for the first
        time: a moving average is the estimate of this batch; temperatures (iSogCLR) and popularities (NUCLR) have
        their initial values. State that belongs to no sample, such as NUCLR's xi, keeps its trained value.

        Raises:
            ConfigError: the objective reads the raw images and captions.
        """
        self.require_value_of_unseen()
        positives = similarity.image_to_text.positives()
        ids = torch.arange(len(positives), device=positives.device)
        with evaluation_mode(self):
            loss: Loss = functional_call(
                self, self.initial_state(len(ids)), (similarity, Batch(ids, ids, ids), progress)
            )
        return loss.total if self.value_log == "loss" else loss.logs[self.value_log]

    def require_value_of_unseen(self) -> None:
        """Raise ConfigError if the objective cannot be evaluated on embeddings only."""
        if self.needs_teacher or self.reads_views:
            inputs = "a teacher" if self.needs_teacher else "raw images and captions"
            raise ConfigError(
                f"objective {self.name} reads {inputs}, which an evaluation does not have, so it has no validation "
                "loss: give eval.validation=null"
            )

    def grown(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return stored state of the first samples of the dataset, with the initial state of all further ones."""
        return state

    def shares(self) -> Mapping[str, StateShare]:
        """Return this rank's parts of buffers that are divided among the ranks, by name; empty if none is."""
        return {}

    def sample_statistics(self) -> Mapping[str, Tensor]:
        """Return statistics of this rank's samples by name, [n] each, nan for unseen ones. Empty without state."""
        return {}


# Compatibility of heads and objectives, decided from the attributes that both declare.


def has_cosine_range(head: Head) -> bool:
    """Return True if the head's scores lie within [-1, 1]; exp(log(1)) in fp32 may differ from 1."""
    low, high = head.score_range
    return low >= -1 - 1e-5 and high <= 1 + 1e-5


@dataclass(frozen=True)
class Compatibility:
    """Compatibility of an objective with a head. reasons: why it cannot train it, with the keys to change, or empty.

    published: True if a paper trains this pair. warnings: warnings about a compatible pair.
    """

    reasons: tuple[str, ...]
    published: bool
    warnings: tuple[str, ...]

    @property
    def compatible(self) -> bool:
        return not self.reasons


def check_pair(head: Head, objective: Objective) -> Compatibility:
    """Return the compatibility of a pair. An incompatible pair has no warnings."""
    reasons = tuple(objective.check(head))
    warnings = () if reasons else tuple(objective.warnings(head))
    return Compatibility(reasons, objective.name in head.published_with, warnings)


def require(head: Head, objective: Objective) -> None:
    """Log the warnings about a pair. Raises ConfigError with all reasons if the pair is incompatible."""
    result = check_pair(head, objective)
    if not result.compatible:
        raise ConfigError("\n         ".join(result.reasons))
    if not result.published:
        pair = f"objective {objective.name} with head {type(head).__name__}"
        log.warning(f"{pair} is compatible, but no paper trains it")
    for warning in result.warnings:
        log.warning(warning)


# Weighted sums of losses over the two directions of a similarity.


def weighted_loss(similarity: Similarity, weights: tuple[float, float], *losses: Callable[[Scores], Tensor]) -> Loss:
    """Return the sum over directions of weight * loss(scores), and the loss of each direction in the logs.

    Rows that are no columns (`Similarity.further`) have the mean weight of the directions, and all weights keep their
    sum: for boxes and their captions the loss is the mean of four (HyCoCLIP).

    weights: of image_to_text and text_to_image; a direction of weight zero is not computed.
    losses: one function for both directions, or one per direction: scores -> scalar, the mean over the local anchors.
    """
    weighted, logs = [], {}
    loss_functions = losses if len(losses) == 2 else losses * 2
    names = "loss_image_to_text", "loss_text_to_image"
    for name, weight, loss, scores in zip(names, weights, loss_functions, similarity.directions, strict=True):
        if weight:
            value = loss(scores)
            weighted.append(weight * value)
            logs[name] = value.detach()
    total = sum(weighted[1:], weighted[0])
    if similarity.further:
        values = torch.stack([loss_functions[0](scores) for scores in similarity.further])
        logs["loss_further"] = values.mean().detach()
        total = (total + sum(weights) / 2 * values.sum()) / (1 + len(values) / 2)
    return Loss(total, logs)


@checked
class WeightedObjective(Objective):
    """Base class of objectives that weigh the two directions: `weighted_loss(similarity, self.weights, loss)`.

    image_to_text, text_to_image: weights of the losses of image anchors and of text anchors.
    same_caption: pairs of different samples with an equal caption or group are negatives, as in CLIP, are left out
        ("ignore"), or are positives ("positive").
    """

    relations = {"image_to_text + text_to_image > 0": "one of the weights must be above 0"}

    def __init__(self, image_to_text: Weight, text_to_image: Weight, same_caption: SameCaption = "negative") -> None:
        super().__init__()
        self.weights, self.same_caption = (image_to_text, text_to_image), same_caption


class LogitScale(nn.Module):
    """exp(log_scale), optimized with the model if learnable.

    initial: initial scale, 1 / temperature. maximum: upper bound of the scale; None for no bound.
    """

    def __init__(self, initial: float, learnable: bool, maximum: float | None) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(initial)), requires_grad=learnable)
        self._log_maximum = math.inf if maximum is None else math.log(maximum)

    def forward(self) -> Tensor:
        with torch.no_grad():
            # The parameter itself is clamped, as by CLIP after a step: a clamped copy has no gradient beyond the bound.
            self.log_scale.clamp_(max=self._log_maximum)
        return self.log_scale.exp()
