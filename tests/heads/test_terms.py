"""Terms that heads add to the loss: exact in micro-batches and on two ranks, and absent without a weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clipzoo.build import build_objective
from clipzoo.distributed.world import World
from clipzoo.encoders.base import Encoder
from clipzoo.model import Model
from clipzoo.training.gradients import GradientCache
from clipzoo.types import Batch, Features, Views
from scripts.compatibility import composed
from tests.support.heads import IMAGE_WIDTH, TEXT_WIDTH, build_head
from tests.support.objectives import progress
from tests.support.ranks import run_ranks

SAMPLES = 6
VIEWS = Views(captions=2, hard=1, boxes=1, crops=2)
PAIRS = (("hycoclip", "infonce"), ("prolip", "siglip"))


class LinearEncoder(Encoder):
    """Two linear maps of vectors."""

    image_width, text_width = IMAGE_WIDTH, TEXT_WIDTH

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image_tower, self.text_tower = nn.Linear(7, IMAGE_WIDTH).double(), nn.Linear(7, TEXT_WIDTH).double()

    def image(self, image: Tensor) -> Features:
        return Features(self.image_tower(image))

    def text(self, text: Tensor) -> Features:
        return Features(self.text_tower(text))


def step(head: str, objective: str, world: World = World(), micro_batch: int | None = None) -> dict[str, Tensor]:
    """Logs and gradients of one step on this rank's share of the samples; logs are means over ranks."""
    model = Model(LinearEncoder(), build_head(head))
    trained = build_objective(composed(f"+objective={objective}")).double()
    drawn = torch.Generator().manual_seed(1)
    image, text = (torch.randn(SAMPLES, n, 7, generator=drawn).double() for n in (VIEWS.images, VIEWS.texts))
    local = slice(world.rank * SAMPLES // world.size, (world.rank + 1) * SAMPLES // world.size)
    batch = Batch(image[local], text[local], torch.arange(SAMPLES)[local], views=VIEWS)
    loss = GradientCache(model, trained, world, micro_batch)(batch, progress())
    results = {"loss": world.mean(loss.total.detach())}
    results |= {name: world.mean(value) for name, value in loss.logs.items() if name.startswith("term_")}
    return results | {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("head", "objective"), PAIRS)
def test_micro_batches_change_nothing(head, objective):
    whole, parts = step(head, objective), step(head, objective, micro_batch=4)
    expected = ["caption_in_box", "image_in_caption", "image_in_crop"]
    expected.append("crop_in_box" if objective == "infonce" else "bottleneck")
    assert sorted(name.removeprefix("term_") for name in whole if name.startswith("term_")) == sorted(expected)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.medium
def test_two_ranks_give_the_terms_and_gradients_of_one():
    ranks = run_ranks(2, _steps)
    for pair in PAIRS:
        whole = step(*pair)
        for rank in ranks:
            torch.testing.assert_close(rank[pair], whole, rtol=1e-10, atol=1e-12)


def _steps() -> dict:
    return {pair: step(*pair, World.from_process_group()) for pair in PAIRS}


def test_terms_without_a_weight_are_left_out():
    image, text = (Features(torch.randn(4, width).double()) for width in (IMAGE_WIDTH, TEXT_WIDTH))
    meru = build_head("meru", "head.entailment=0")
    assert meru.terms(meru(image, text)) == {}
    weightless = build_head("prolip", "head.inclusion=0", "head.part_inclusion=0", "head.bottleneck=0")
    assert weightless.terms(weightless(image, text)) == {}
