"""Interface of objectives."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor, nn

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
                f"objective {self.name} has no temperature of its own, and head {type(head).__name__} gives it plain "
                "cosines, which are too flat to train well: use head=clip, or give this head a temperature"
            )
        return warnings

    def allocate(self, samples: int) -> None:
        """Allocate the per-sample state for a dataset of `samples` samples. No-op for objectives without state."""

    def share(self, world: World) -> None:
        """Divide the per-sample state among the ranks. Before `allocate`. No-op for objectives without state."""

    def shares(self) -> Mapping[str, Share]:
        """Return this rank's parts of buffers that are divided among the ranks, by name; empty if none is."""
        return {}

    def sample_statistics(self) -> Mapping[str, Tensor]:
        """Return statistics of this rank's samples by name, [n] each, nan for unseen ones. Empty without state."""
        return {}
