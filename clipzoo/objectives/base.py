"""What every objective can do."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor, nn

from clipzoo.heads.base import Head
from clipzoo.objectives.requirements import are_cosines
from clipzoo.types import Batch, Loss, Progress, Similarity


class Objective(nn.Module):
    """Turns similarities into a loss. Per-sample state, where there is any, lives in buffers addressed by sample id."""

    name: str
    own_temperature: bool = False
    """Scales the scores itself: they should be plain cosines."""

    @abstractmethod
    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        """`total` is this rank's share: its mean over ranks is the loss of the global batch.

        Computed outside autocast, in the precision of the similarity. In training mode, updates the state.
        """

    def check(self, head: Head) -> list[str]:
        """Why this objective cannot train this head: each reason with the key to change. Empty when it can."""
        return []

    def warnings(self, head: Head) -> list[str]:
        """What is sound but worth knowing about this pair."""
        found = []
        if self.name not in head.published_with:
            found.append(
                f"objective {self.name} with head {type(head).__name__} is in none of the papers (sound, unpublished)"
            )
        if not self.own_temperature and are_cosines(head.score_range):
            found.append(
                f"objective {self.name} has no temperature of its own, and head {type(head).__name__} gives it plain "
                "cosines, too flat to train well on: take head=clip, or give this head a temperature"
            )
        return found

    def allocate(self, samples: int) -> None:
        """Make the per-sample state for a data set of `samples` samples. Stateless objectives have none."""

    def sample_statistics(self) -> Mapping[str, Tensor]:
        """What the state says of the samples, a [n] tensor each, nan for a sample not seen. Empty without state."""
        return {}
