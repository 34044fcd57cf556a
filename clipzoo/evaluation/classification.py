"""Accuracies, in percent."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from clipzoo.evaluation.checks import check_classes


def accuracies(labels: Tensor, place: Tensor, class_names: Sequence[str], where: str) -> dict[str, float]:
    """labels [n] and the place of each sample's own class [n] -> top1, mean_per_class; top5 above five classes.

    mean_per_class: every class's share of right answers, averaged over classes.
    """
    check_classes(labels, class_names, where)
    right = place == 0
    sizes = torch.bincount(labels, minlength=len(class_names))
    per_class = torch.bincount(labels[right], minlength=len(class_names)).double() / sizes
    found = {"top1": _percent(right), "mean_per_class": 100 * per_class.mean().item()}
    if len(class_names) > 5:
        found["top5"] = _percent(place < 5)
    return found


def confusion(labels: Tensor, predictions: Tensor, classes: int) -> Tensor:
    """[n] and [n] -> [classes, classes] counts, a row a true class, a column a predicted one."""
    return torch.bincount(labels * classes + predictions, minlength=classes * classes).view(classes, classes)


def over_draws(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean over several draws, and beside it `<metric>_std`, the sample deviation; one draw stays as it is."""
    if len(found) == 1:
        return dict(found[0])
    summary = {}
    for key in found[0]:
        values = [each[key] for each in found]
        summary[key] = statistics.fmean(values)
        summary[f"{key}_std"] = statistics.stdev(values)
    return summary


def _percent(hits: Tensor) -> float:
    return 100 * int(hits.sum()) / len(hits)
