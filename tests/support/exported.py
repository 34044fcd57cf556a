"""Models to export, and pictures and captions that show every difference in preprocessing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

from clipzoo.build import build_model
from clipzoo.loading import LoadedModel
from tests.support.evaluation_sets import config_of

SIZES = ((32, 32), (35, 32), (32, 47), (90, 61), (40, 33), (300, 50), (20, 31))
"""Heights and widths: square, barely too large, odd margins, large, smaller than the model's images."""
CAPTIONS = (
    "a red circle", "", "two blue squares! above a (green) triangle.", "it's 1234 o'clock  \t in\nParis",
    "überraschung, naïve café", "“quoted” &amp; ‘curly’ &lt;b&gt;", "the end <end_of_text> is not here",
    "東京 🎉 party", "! !! ?", "long " + "very " * 200 + "long",
)  # fmt: skip
"""Captions: empty, too long, with entities, quotes, other scripts and the text of a control token."""


def loaded(head: str, *overrides: str) -> LoadedModel:
    """An untrained model in float32 whose temperatures, biases and norms are no defaults."""
    config = config_of(head, *overrides)
    model = LoadedModel(build_model(config), config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.encoder.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def pictures(count: int) -> list[Image.Image]:
    """Smooth RGB pictures with noise, of the sizes of SIZES in turn."""
    random = np.random.default_rng(0)
    images = []
    for index in range(count):
        height, width = SIZES[index % len(SIZES)]
        coarse = Image.fromarray(random.integers(0, 256, (5, 4, 3), dtype=np.uint8)).resize((width, height))
        noisy = np.asarray(coarse) + random.normal(0, 12, (height, width, 3))
        images.append(Image.fromarray(noisy.clip(0, 255).astype(np.uint8)))
    return images


def captions(count: int) -> list[str]:
    return [
        f"{CAPTIONS[index % len(CAPTIONS)]}{f' {index}' if index >= len(CAPTIONS) else ''}" for index in range(count)
    ]


@torch.no_grad()
def logits(model: LoadedModel, images: list[Image.Image], texts: list[str]) -> torch.Tensor:
    """[n, k], as a user computes them."""
    pixels = torch.stack([model.transform(image) for image in images])
    return model.similarity(model.encode_image(pixels), model.encode_text(model.tokenizer(texts)))


def assert_equal_states(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
