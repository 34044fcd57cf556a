"""What every objective can do."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor, nn

from clipzoo.heads.base import Head
from clipzoo.types import Batch, Loss, Progress, Similarity


class Objective(nn.Module):
    """Turns similarities into a loss. Per-sample state, where there is any, lives in buffers addressed by sample id."""

    name: str

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
        if self.name in head.published_with:
            return []
        return [f"objective {self.name} with head {type(head).__name__} is in none of the papers (sound, unpublished)"]

    def allocate(self, samples: int) -> None:
        """Make the per-sample state for a data set of `samples` samples. Stateless objectives have none."""

    def sample_statistics(self) -> Mapping[str, Tensor]:
        """What the state says of the samples, a [n] tensor each, nan for a sample not seen. Empty without state."""
        return {}
