"""What an evaluation leaves for the report to draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from clipzoo.evaluation.classification import confusion
from clipzoo.evaluation.retrieval import Retrieval
from clipzoo.evaluation.zero_shot import ZeroShot

THUMBNAIL = 112
QUERIES, FOUND, MISTAKES = 6, 5, 12


def write_zero_shot(path: Path, data: Any, split: str, result: ZeroShot) -> None:
    """confusion [K, K], class_names, and of the most confident mistakes: images, labels, predictions, margins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    wrong = (result.labels != result.predictions).nonzero().flatten()
    worst = wrong[result.margins[wrong].argsort(descending=True, stable=True)][:MISTAKES]
    np.savez_compressed(
        path,
        confusion=confusion(result.labels, result.predictions, len(data.class_names)).numpy(),
        class_names=np.array(data.class_names),
        images=_thumbnails([data.splits[split][int(index)][0] for index in worst]),
        labels=result.labels[worst].numpy(),
        predictions=result.predictions[worst].numpy(),
        margins=result.margins[worst].float().numpy(),
    )


def write_retrieval(path: Path, data: Any, result: Retrieval) -> None:
    """Of a few captions, evenly spaced: caption, place of its own picture, the pictures it finds, best first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    chosen = torch.linspace(0, len(data.captions) - 1, min(QUERIES, len(data.captions))).long().tolist()
    found = result.found[chosen][:, :FOUND]
    np.savez_compressed(
        path,
        captions=np.array([data.captions[index] for index in chosen]),
        place=result.place[chosen].numpy(),
        found=found.numpy(),
        owner=np.array([data.caption_image[index] for index in chosen]),
        images=np.stack([_thumbnails([data.images[int(index)] for index in row]) for row in found]),
        gallery=len(data.images),
    )


def _thumbnails(pictures: list[Any]) -> np.ndarray:
    """[m, S, S, 3] uint8: the whole picture on white."""
    from PIL import Image, ImageOps

    size = (THUMBNAIL, THUMBNAIL)
    squares = [ImageOps.pad(each.convert("RGB"), size, Image.Resampling.BICUBIC, "white") for each in pictures]
    return np.stack([np.asarray(each) for each in squares]) if squares else np.zeros((0, *size, 3), np.uint8)
