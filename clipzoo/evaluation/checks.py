"""Checks for faults of an evaluation dataset that would otherwise give wrong numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clipzoo.errors import ConfigError, number_of


def check_labels(labels: Tensor, class_names: Sequence[str], where: str) -> None:
    """Raise ConfigError unless every label has a class name. where: dataset and split, for the message."""
    wrong = labels[(labels < 0) | (labels >= len(class_names))]
    if len(wrong):
        raise ConfigError(f"{where}: label {int(wrong[0])}, but its classes are 0 to {len(class_names) - 1}")


def check_classes(labels: Tensor, class_names: Sequence[str], where: str) -> None:
    """Raise ConfigError unless there are at least two classes and every class has a sample."""
    if len(class_names) < 2:
        raise ConfigError(f"{where}: {len(class_names)} class, nothing can be classified")
    empty = (torch.bincount(labels, minlength=len(class_names)) == 0).nonzero().flatten().tolist()
    if empty:
        shown = ", ".join(repr(class_names[index]) for index in empty[:5])
        raise ConfigError(
            f"{where}: {len(empty)} of {number_of(len(class_names), 'class', 'es')} have no sample ({shown})"
        )


def check_finite(features: Tensor, where: str) -> None:
    """Raise ConfigError if a feature is NaN or infinite."""
    broken = (~torch.isfinite(features)).any(dim=1).nonzero().flatten()
    if len(broken):
        raise ConfigError(
            f"{where}: {len(broken)} of {number_of(len(features), 'image')} have features that are NaN or infinite"
        )


def check_captions(caption_image: Tensor, images: int, captions: int, name: str) -> None:
    """Raise ConfigError unless every caption belongs to an image and every image has a caption.

    caption_image: [captions], index of each caption's image. images, captions: their numbers. name: of the dataset.
    """
    if len(caption_image) != captions:
        raise ConfigError(
            f"{name}: {number_of(captions, 'caption')}, but {len(caption_image)} entries in caption_image"
        )
    if captions == 0 or caption_image.min() < 0 or caption_image.max() >= images:
        shown = caption_image.tolist()[:5]
        raise ConfigError(
            f"{name}: captions belong to images {shown}..., but the dataset has {number_of(images, 'image')}"
        )
    without = (torch.bincount(caption_image, minlength=images) == 0).nonzero().flatten().tolist()
    if without:
        raise ConfigError(
            f"{name}: {len(without)} of {number_of(images, 'image')} have no caption (the first is number {without[0]})"
        )


def check_paired(caption_image: Tensor, name: str) -> None:
    """Raise ConfigError unless all images have equally many captions. caption_image: see `check_captions`."""
    counts = torch.bincount(caption_image)
    if counts.min() != counts.max():
        raise ConfigError(
            f"{name}: images have {int(counts.min())} to {int(counts.max())} captions, but the paired protocol needs "
            "equally many: set eval.paired=false"
        )
