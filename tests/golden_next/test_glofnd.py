"""GloFND against eight steps of the released thresholds, and against a loss of only the kept negatives."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clipzoo.distributed.world import World
from clipzoo.objectives.fastclip import FastCLIP
from clipzoo.objectives.glofnd import GloFND
from clipzoo.types import Batch, Progress
from tests.golden_next.test_fastclip import agrees, cosines
from tests.support.objectives import FASTCLIP_OPTIONS, GLOFND_OPTIONS, batch, random_cosines, similarity

NUMBERS = {name: torch.from_numpy(array) for name, array in np.load(Path(__file__).with_name("glofnd.npz")).items()}
SAMPLES = NUMBERS["lam"].shape[1]
OPTIONS: dict[str, Any] = {
    **GLOFND_OPTIONS, "version": "v1", "gamma": 1.0, "alpha": NUMBERS["alpha"].item(), "start": 1,
    "threshold_rate": NUMBERS["lr"].item(), "threshold_betas": [NUMBERS["beta1"].item(), NUMBERS["beta2"].item()],
    "adam_epsilon": NUMBERS["eps"].item(),
}  # fmt: skip


def test_thresholds_and_kept_negatives_are_those_of_the_released_code():
    """The released code moves thresholds from epoch 1 on, and leaves negatives out from epoch 2 on."""
    objective = GloFND(**OPTIONS).double()
    objective.log_scale.data.fill_(-math.log(OPTIONS["temperature"]))
    objective.allocate(SAMPLES)
    for step, ids in enumerate(NUMBERS["ids"]):
        matrix = NUMBERS["sim"][step].clone().requires_grad_()
        epoch = NUMBERS["epochs"][step].item()
        size = len(ids)
        # Text anchors have other scores: their thresholds are their own.
        other = random_cosines(step, size)
        loss = objective(similarity(matrix, other), batch(ids), Progress(5 * epoch, 50, 5 * size, size))
        for buffer, array in (("threshold", "lam"), ("threshold_mean", "m"), ("threshold_square", "v")):
            assert agrees(objective.get_buffer(buffer)[0], NUMBERS[array][step])
        if epoch < NUMBERS["start_filter"].item():
            continue
        (gradient,) = torch.autograd.grad(loss.total, matrix)
        keep = NUMBERS["keep"][step].bool()
        off_diagonal = ~torch.eye(size, dtype=torch.bool)
        assert torch.equal(gradient[off_diagonal] != 0, keep[off_diagonal])
        g = objective.log_u[0, ids].exp() * NUMBERS["kept"][step]
        terms = ((matrix - matrix.diagonal()[:, None]).detach() / OPTIONS["temperature"]).exp()
        torch.testing.assert_close(g, (terms * keep).sum(dim=1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("version", ["v1", "v3"])
@pytest.mark.parametrize("tile", [None, 3], ids=["matrix", "tiles"])
def test_before_its_start_it_is_fastclip_and_then_the_stateless_loss_of_the_kept_negatives(version, tile):
    objective = GloFND(**{**OPTIONS, "version": version, "alpha": 0.4, "start": 1, "threshold_rate": 0.6}).double()
    fastclip = FastCLIP(**{**FASTCLIP_OPTIONS, "version": version, "gamma": 1.0}).double()
    for one in (objective, fastclip):
        one.log_scale.data.fill_(-math.log(0.2))
        one.allocate(7)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        vectors = torch.nn.functional.normalize(torch.randn(2, 7, 3, generator=generator, dtype=torch.float64), dim=2)
        image, text = vectors.unbind()
        image, text = image.requires_grad_(), text.requires_grad_()
        at, of = Progress(3 * step, 60, 21, 7), Batch(image, text, torch.arange(7))
        loss = objective(cosines(image, text, World(), tile), of, at)
        plain = fastclip(cosines(image, text, World(), None), of, at).total
        if step >= 1:
            matrix, value = image @ text.mT, 0.0
            for scores, threshold in zip((matrix, matrix.mT), objective.threshold, strict=True):
                keep = (scores <= threshold[:, None]) & ~torch.eye(7, dtype=torch.bool)
                terms = ((scores - scores.diagonal()[:, None]) / 0.2).exp() * keep
                kept = keep.any(dim=1)
                g = terms.sum(dim=1)[kept] / keep.sum(dim=1)[kept]
                logs = g.log() if version == "v1" else 0.2 * (g.log() + 1.5)
                value = value + logs.sum() / 7 / 2
            torch.testing.assert_close(loss.logs["objective"], value.detach(), rtol=1e-10, atol=0)
            plain = value
        gradients, expected = (torch.autograd.grad(total, [image, text]) for total in (loss.total, plain))
        for gradient, wanted in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)
    assert math.isfinite(loss.total)
