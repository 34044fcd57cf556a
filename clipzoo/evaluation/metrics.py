"""Accuracy and recall as torchmetrics with exact integer counts. Importing torchmetrics takes seconds: import late."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from clipzoo.distributed.world import World


class TopCounts(Metric):
    """Number of queries whose right answer is among the first k of all answers, per class of the query.

    torchmetrics' MulticlassAccuracy and RetrievalHitRate order scores by topk, whose order of equal scores is
    unspecified, and average in float32. Here the caller gives the position of the right answer (see `ranking`), and the
    states are integers: percentages are the same on any device and any number of ranks.

    Args:
        cutoffs: the values of k.
        classes: number of classes.
        world: the ranks whose counts `compute` adds up. Collective.
    """

    full_state_update = False
    hits: Tensor  # [cutoffs, classes]
    samples: Tensor  # [classes]

    def __init__(self, cutoffs: Sequence[int], classes: int, world: World) -> None:
        super().__init__(
            dist_sync_fn=lambda tensor, group: list(world.gather(tensor[None])),
            distributed_available_fn=lambda: world.size > 1,
        )
        self.cutoffs, self.classes = tuple(cutoffs), classes
        self.add_state("hits", torch.zeros(len(self.cutoffs), classes, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("samples", torch.zeros(classes, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, position: Tensor, label: Tensor | None = None) -> None:
        """Count queries. position: [n], 0 for the best answer. label: [n], the query's class; None for one class."""
        label = torch.zeros_like(position) if label is None else label
        self.samples += torch.bincount(label, minlength=self.classes)
        for row, cutoff in enumerate(self.cutoffs):
            self.hits[row] += torch.bincount(label[position < cutoff], minlength=self.classes)

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Return metrics in percent by name."""

    def percent(self) -> list[float]:
        """Percentage of hits for each cutoff, over all queries."""
        return [100 * int(row.sum()) / int(self.samples.sum()) for row in self.hits]


class Accuracy(TopCounts):
    """top1, mean_per_class, and for more than five classes top5.

    mean_per_class: top-1 accuracy of each class, averaged over the classes that have samples.
    """

    def __init__(self, classes: int, world: World) -> None:
        super().__init__((1, 5) if classes > 5 else (1,), classes, world)

    def compute(self) -> dict[str, float]:
        present = self.samples > 0
        per_class = self.hits[0][present].double() / self.samples[present]
        names = [f"top{cutoff}" for cutoff in self.cutoffs]
        values = dict(zip(names, self.percent(), strict=True))
        return {"top1": values.pop("top1"), "mean_per_class": 100 * per_class.mean().item(), **values}


class Recall(TopCounts):
    """recall_at_k: the share of queries with any right answer among the first k."""

    def __init__(self, cutoffs: Sequence[int], world: World) -> None:
        super().__init__(cutoffs, 1, world)

    def compute(self) -> dict[str, float]:
        names = [f"recall_at_{cutoff}" for cutoff in self.cutoffs]
        return dict(zip(names, self.percent(), strict=True))
