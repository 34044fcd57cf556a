"""Predictions of an evaluation in .npz files, from which the report draws its figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageOps

from clipzoo.evaluation.datasets.dataset import ClassificationDataset, RetrievalDataset
from clipzoo.io import whole

if TYPE_CHECKING:
    from clipzoo.evaluation.retrieval import Retrieval
    from clipzoo.evaluation.zero_shot import ZeroShot

THUMBNAIL = 112
CAPTIONS, RETRIEVED, MISTAKES = 6, 5, 12


def write_zero_shot(path: Path, dataset: ClassificationDataset, result: ZeroShot) -> None:
    """Write the confusion matrix [K, K] (rows: labels, columns: predictions), predictions, and the worst mistakes.

    With groups: their names and top-1, "groups" and "group_top1" [groups].
    """
    mistakes = (result.labels != result.predictions).nonzero().flatten()
    worst = mistakes[result.margins[mistakes].argsort(descending=True, stable=True)][:MISTAKES]
    classes = len(dataset.class_names)
    cells = torch.bincount(result.labels * classes + result.predictions, minlength=classes**2)
    groups = {}
    if result.group_top1 is not None:
        groups = {"groups": np.array(dataset.groups), "group_top1": result.group_top1.numpy()}
    write_arrays(
        path,
        confusion=cells.view(classes, classes).numpy(),
        class_names=np.array(dataset.class_names),
        images=_thumbnails([dataset.split_images("test")[int(index)] for index in worst]),
        labels=result.labels[worst].numpy(),
        predictions=result.predictions[worst].numpy(),
        margins=result.margins[worst].float().numpy(),
        all_labels=result.labels.numpy(),
        all_predictions=result.predictions.numpy(),
        **groups,
    )


def write_retrieval(path: Path, dataset: RetrievalDataset, result: Retrieval) -> None:
    """Write the positions of right answers in both directions, and a few captions with the images they retrieve."""
    caption_indices = torch.linspace(0, len(dataset.captions) - 1, min(CAPTIONS, len(dataset.captions))).long().tolist()
    retrieved = result.retrieved[caption_indices][:, :RETRIEVED]
    write_arrays(
        path,
        captions=np.array([dataset.captions[index] for index in caption_indices]),
        place=result.positions[caption_indices].numpy(),
        found=retrieved.numpy(),
        owner=np.array([dataset.caption_image[index] for index in caption_indices]),
        images=np.stack([_thumbnails([dataset.images[int(index)] for index in row]) for row in retrieved]),
        gallery=len(dataset.images),
        all_places=result.positions.numpy(),
        all_owners=np.array(dataset.caption_image),
        all_image_places=result.image_positions.numpy(),
    )


def write_arrays(path: Path, **arrays: np.ndarray | int) -> None:
    """Write an .npz file atomically."""
    with whole(path) as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def _thumbnails(images: Sequence[Image.Image]) -> np.ndarray:
    """[m, S, S, 3] uint8: whole images on white."""
    size = (THUMBNAIL, THUMBNAIL)
    squares = [np.asarray(ImageOps.pad(image, size, Image.Resampling.BICUBIC, "white")) for image in images]
    return np.array(squares, np.uint8).reshape(-1, *size, 3)
