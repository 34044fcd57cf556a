"""Faults of a data set that would turn into wrong numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clipzoo.errors import ConfigError


def check_labels(labels: Tensor, class_names: Sequence[str], data: str, split: str) -> None:
    """Raise unless every label names a class."""
    wrong = labels[(labels < 0) | (labels >= len(class_names))]
    if len(wrong):
        raise ConfigError(f"{data}, {split}: label {int(wrong[0])}, but its classes are 0 to {len(class_names) - 1}")


def check_classes(labels: Tensor, class_names: Sequence[str], where: str) -> None:
    """Raise unless there are two classes at least and each has a sample."""
    if len(class_names) < 2:
        raise ConfigError(f"{where}: {len(class_names)} class, nothing can be classified")
    empty = (torch.bincount(labels, minlength=len(class_names)) == 0).nonzero().flatten().tolist()
    if empty:
        shown = ", ".join(repr(class_names[index]) for index in empty[:5])
        raise ConfigError(f"{where}: {len(empty)} of {len(class_names)} classes have no sample ({shown})")


def check_finite(features: Tensor, where: str) -> None:
    """Raise when a feature is NaN or infinite."""
    broken = (~torch.isfinite(features)).any(dim=1).nonzero().flatten()
    if len(broken):
        raise ConfigError(f"{where}: {len(broken)} of {len(features)} images have features that are not finite numbers")


def check_paired(caption_image: Sequence[int] | Tensor, where: str) -> None:
    """Raise unless all pictures have equally many captions. caption_image: each caption's picture."""
    counts = torch.bincount(torch.as_tensor(caption_image))
    if counts.min() != counts.max():
        raise ConfigError(
            f"{where}: pictures have {int(counts.min())} to {int(counts.max())} captions, the paired protocol needs "
            "equally many: eval.paired=false"
        )
