"""Handwritten digits: scikit-learn's 8 x 8 ones, which come with it, or MNIST where the user has it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from clipzoo.errors import ConfigError

Split = tuple[Tensor, Tensor]
"""Images [n, 1, 28, 28] in [0, 1] and labels [n] int64."""


def load_digits(mnist: str | None, test_share: float, seed: int) -> tuple[Split, Split]:
    """Train and test. mnist: the folder in which torchvision keeps it (MNIST/raw); null for scikit-learn's digits."""
    if mnist is None:
        return _from_scikit_learn(test_share, seed)
    return _from_mnist(Path(mnist), train=True), _from_mnist(Path(mnist), train=False)


def _from_scikit_learn(test_share: float, seed: int) -> tuple[Split, Split]:
    try:
        from sklearn.datasets import load_digits as bundled
    except ImportError:
        raise ConfigError(
            "scikit-learn's digits are not there: pip install 'clipzoo[studies]', or give study.mnist=FOLDER"
        ) from None
    found = bundled()
    small = torch.from_numpy(found.images).float()[:, None] / 16
    # Enlarged to MNIST's size, so that one network serves both.
    images = functional.interpolate(small, size=(28, 28), mode="bilinear", align_corners=False)
    labels = torch.from_numpy(found.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    held_out = round(test_share * len(images))
    test, train = order[:held_out], order[held_out:]
    return (images[train], labels[train]), (images[test], labels[test])


def _from_mnist(folder: Path, train: bool) -> Split:
    from torchvision.datasets import MNIST

    try:
        found = MNIST(str(folder), train=train, download=False)
    except RuntimeError:
        raise ConfigError(
            f"study.mnist={folder} holds no MNIST: torchvision looks for the four files in {folder}/MNIST/raw"
        ) from None
    return found.data.float()[:, None] / 255, found.targets.long()
