"""The comparison of methods on drawings: batches from pictures in memory, and the same training by open_clip."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from clipzoo.build import build_model, build_objective, build_part
from clipzoo.config.compose import compose
from clipzoo.data.tokenizer import ClipTokenizer
from clipzoo.lab.worlds.hands import Drawing
from clipzoo.training.parts import Optimizer
from clipzoo.training.train import train
from clipzoo.types import World
from tests.support.paths import ROOT

PART = [Drawing(str(number), f"thing {number}", keywords=("round", "red"), hand="x") for number in range(12)]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return import_module("hands_methods")


def drawings(script: Any) -> Any:
    images = torch.randint(256, (len(PART), 3, script.LARGE, script.LARGE), dtype=torch.uint8)
    return script.Drawings(images, PART, 32, ClipTokenizer(24))


def test_a_batch_has_squares_of_the_pictures_with_their_captions(script):
    dataset, tokenizer = drawings(script), ClipTokenizer(24)
    arguments = {"seed": 0, "global_batch": 6, "world": World(), "start_step": 0, "stop_step": 8, "trim_text": False}
    seen = set()
    for batch in dataset.batches(**arguments):
        for image, text, number in zip(batch.image, batch.text, batch.sample_id.tolist(), strict=True):
            windows = dataset._images[number].unfold(1, 32, 1).unfold(2, 32, 1).permute(1, 2, 0, 3, 4).flatten(0, 1)
            assert (windows == image).flatten(1).all(dim=1).any()
            matches = (tokenizer(PART[number].captions) == text).all(dim=1)
            assert matches.any()
            seen.add((number, int(matches.int().argmax())))
    assert {number for number, _ in seen} == set(range(12)) and len({place for _, place in seen}) == 2


@pytest.mark.medium
def test_open_clip_trains_the_same_model_from_the_same_batches(script):
    overrides = ["experiment=hands/clip", "encoder=tiny", "encoder.image_width=32", "optim.schedule.start=null"]
    plain, dataset = compose([*overrides, "optim.schedule.warmup_steps=2"]), drawings(script)
    peer, _ = script.train_in_open_clip(build_model(plain), plain, dataset, 6, 4)
    model = build_model(plain)
    train(
        model, build_objective(plain), dataset, batch=6, steps=4, evaluate_every=None, device="cpu", quiet=True,
        optimizer=build_part(plain["optim"], kind=Optimizer),
    )  # fmt: skip
    text = ClipTokenizer(plain["encoder"]["context_length"])([drawing.name for drawing in PART])
    torch.testing.assert_close(peer.encode_text(text), model.encode_text(text), rtol=1e-3, atol=1e-4)
    images = dataset._images[:, :, :32, :32]
    torch.testing.assert_close(peer.encode_image(images), model.encode_image(images), rtol=1e-3, atol=1e-4)
