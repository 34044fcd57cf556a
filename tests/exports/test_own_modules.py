"""Models of transformers that our towers cannot represent run its own modules: transformers is the judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import clipzoo
from tests.support.exported import pictures
from tests.support.two_view_models import KINDS, write_two_view_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.medium
TEXTS = ["a red circle", "", "two very red squares", "a " + "very " * 40 + "red circle"]


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory) -> Path:
    """A small random model of each kind in the layout of transformers."""
    folder = tmp_path_factory.mktemp(request.param) / "model"
    write_two_view_model(request.param, folder)
    return folder


def inputs_of(folder: Path, images: list[Any], texts: list[str]) -> Any:
    """Inputs as the model's own image processor of pictures and its own tokenizer prepare them."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt")
    if "siglip" in str(folder):
        del text["attention_mask"]
    return {**text, "pixel_values": torch.as_tensor(processor(images, return_tensors="pt")["pixel_values"])}


@torch.no_grad()
def test_logits_and_pixels_are_those_of_transformers_in_float64(folder):
    peer = transformers.AutoModel.from_pretrained(folder).double().eval()
    model = clipzoo.load(folder).double()
    images = pictures(7)
    inputs = inputs_of(folder, images, TEXTS)
    ours = torch.stack([model.transform(image) for image in images])
    print((model.encoder.pixels(ours)["pixel_values"] - inputs["pixel_values"]).abs().flatten(1).max(1).values)
    expected = peer(**{**inputs, "pixel_values": model.encoder.pixels(ours)["pixel_values"]}).logits_per_image
    logits = model.pair_logits(model.encode_image(ours), model.encode_text(TEXTS))
    torch.testing.assert_close(logits, expected, rtol=1e-7, atol=1e-9)
