"""Handwritten digits: the 8 x 8 digits bundled with scikit-learn, or a local copy of MNIST."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from clipzoo.errors import ConfigError, installation

Split = tuple[Tensor, Tensor]
"""Images [n, 1, 28, 28] in [0, 1] and labels [n] int64."""


def load_digits(mnist: str | None, test_share: float, seed: int) -> tuple[Split, Split]:
    """Load the train and test splits.

    mnist: folder with torchvision's MNIST/raw; None for scikit-learn's digits. test_share: fraction of scikit-learn's
    digits used for testing.
    """
    if mnist is None:
        return _from_scikit_learn(test_share, seed)
    return _from_mnist(Path(mnist), train=True), _from_mnist(Path(mnist), train=False)


def _from_scikit_learn(test_share: float, seed: int) -> tuple[Split, Split]:
    try:
        from sklearn.datasets import load_digits as bundled
    except ImportError:
        raise ConfigError(
            f"scikit-learn is not installed: {installation('studies')}, or set study.mnist=FOLDER"
        ) from None
    digits = bundled()
    small = torch.from_numpy(digits.images).float()[:, None] / 16
    # Enlarge to the size of MNIST so that both use the same network.
    images = functional.interpolate(small, size=(28, 28), mode="bilinear", align_corners=False)
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    held_out = round(test_share * len(images))
    test, train = order[:held_out], order[held_out:]
    return (images[train], labels[train]), (images[test], labels[test])


def _from_mnist(folder: Path, train: bool) -> Split:
    from torchvision.datasets import MNIST

    try:
        digits = MNIST(str(folder), train=train, download=False)
    except RuntimeError:
        raise ConfigError(
            f"study.mnist={folder} does not contain MNIST: expected its four files in {folder}/MNIST/raw"
        ) from None
    return digits.data.float()[:, None] / 255, digits.targets.long()
