"""Interface of objectives."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from clipzoo.errors import ConfigError
from clipzoo.heads.base import Head
from clipzoo.objectives.requirements import are_cosines
from clipzoo.types import Batch, Loss, Progress, Similarity, World

Share = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A part of a tensor: the shape of the whole, the first indices of the part, its shape."""


class Objective(nn.Module):
    """Base class of objectives: an objective computes a loss from similarities.

    Per-sample state is held in buffers addressed by sample id. name: the objective's name in conf/objective.
    """

    name: str
    loss_unit = ""
    """Unit of the loss in curves: "nats" for a negative log-likelihood or a bound of mutual information, else empty."""
    own_temperature: bool = False
    """True if the objective scales the scores itself, which should then be plain cosines."""
    needs_negatives: bool = False
    """True if the loss is not defined for a global batch of one sample, which has no negatives."""
    depends_on_length: bool = False
    """True if a step depends on the length of the training, `Progress.total_steps`."""
    value_log = "loss"
    """Name in the log of the objective's value: another one if the loss is a surrogate, with the gradient alone."""
    reads_views: bool = False
    """True if the objective reads the raw images and captions of the batch, and not their similarities only."""

    def __call__(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        """See `forward`. Raises ConfigError for a global batch of one sample if the objective needs negatives."""
        if self.needs_negatives and similarity.image_to_text.columns < 2:
            raise ConfigError(
                f"objective {self.name} compares a sample with the other samples of its batch, and the global batch "
                "has 1 sample: give it at least 2"
            )
        loss: Loss = super().__call__(similarity, batch, progress)
        return loss

    @abstractmethod
    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        """Return the loss of this rank's anchors; its mean over ranks is the loss of the global batch.

        Computed outside autocast, in the precision of the similarity. In training mode the per-sample state is updated.
        """

    def check(self, head: Head) -> list[str]:
        """Return the reasons why this objective cannot train this head, with the keys to change; empty if it can."""
        return []

    def warnings(self, head: Head) -> list[str]:
        """Return warnings about a compatible pair of head and objective."""
        warnings = []
        if not self.own_temperature and are_cosines(head.score_range):
            warnings.append(
                f"objective {self.name} has no temperature, and head {type(head).__name__} gives it plain "
                "cosines, which are too flat to train well: use head=clip, or give this head a temperature"
            )
        return warnings

    def allocate(self, samples: int) -> None:
        """Allocate the per-sample state for a dataset of `samples` samples. No-op for objectives without state."""

    def initial_state(self, samples: int) -> dict[str, Tensor]:
        """Return the per-sample state of `samples` samples that no batch has set, by name; empty without state."""
        return {}

    @torch.no_grad()
    def value_of_unseen(self, similarity: Similarity, progress: Progress) -> Tensor:
        """Return the objective's value, [], for the N pairs of one rank's batch that are not in the dataset.

        Nothing of the objective changes. Such pairs have no state of their own; they get the initial one, as samples
        of the dataset do when they come first: a moving average is the estimate of this batch (SogCLR, iSogCLR,
        NUCLR), a temperature is the initial one (iSogCLR), and so is a popularity (NUCLR). State that is not of a
        sample, such as NUCLR's xi, is that of the training.

        Raises:
            ConfigError: the objective reads the raw images and captions.
        """
        self.require_value_of_unseen()
        scores = similarity.image_to_text.positives()
        ids = torch.arange(len(scores), device=scores.device)
        training = self.training
        self.eval()
        try:
            state = self.initial_state(len(scores))
            loss: Loss = functional_call(self, state, (similarity, Batch(ids, ids, ids), progress))
        finally:
            self.train(training)
        return loss.total if self.value_log == "loss" else loss.logs[self.value_log]

    def require_value_of_unseen(self) -> None:
        """Raise ConfigError if the objective has no value for embeddings alone."""
        if self.reads_views:
            raise ConfigError(
                f"objective {self.name} compares raw images and captions, which an evaluation does not keep, so it has "
                "no validation loss: give eval.validation=null"
            )

    def share(self, world: World) -> None:
        """Divide the per-sample state among the ranks. Before `allocate`. No-op for objectives without state."""

    def shares(self) -> Mapping[str, Share]:
        """Return this rank's parts of buffers that are divided among the ranks, by name; empty if none is."""
        return {}

    def sample_statistics(self) -> Mapping[str, Tensor]:
        """Return statistics of this rank's samples by name, [n] each, nan for unseen ones. Empty without state."""
        return {}
