"""Per-sample state: size, updates, validation; and fp32 at the smallest temperature."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from clipzoo.errors import ConfigError
from clipzoo.objectives.dcl import DCL
from clipzoo.objectives.fastclip import FastCLIP
from clipzoo.objectives.glofnd import GloFND
from clipzoo.objectives.hardness import Hardness
from clipzoo.objectives.infoloob import InfoLOOB
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.objectives.isogclr import ISogCLR
from clipzoo.objectives.joint import Joint
from clipzoo.objectives.nuclr import NUCLR
from clipzoo.objectives.per_sample import PerSampleObjective
from clipzoo.objectives.rince import RINCE
from clipzoo.objectives.siglip import SigLIP
from clipzoo.objectives.sinkhorn import Sinkhorn
from clipzoo.objectives.sogclr import SogCLR
from tests.support.objectives import (
    FASTCLIP_OPTIONS,
    GLOFND_OPTIONS,
    ISOGCLR_OPTIONS,
    NUCLR_OPTIONS,
    ORDER,
    SAMPLES,
    SOGCLR_OPTIONS,
    batch,
    loss_of,
    progress,
    random_cosines,
    similarity,
)

MAKERS = {
    "nuclr": lambda: NUCLR(**{**NUCLR_OPTIONS, "frozen_epochs": 0}),
    "sogclr": lambda: SogCLR(**SOGCLR_OPTIONS),
    "isogclr": lambda: ISogCLR(**ISOGCLR_OPTIONS),
    "fastclip_v2": lambda: FastCLIP(**{**FASTCLIP_OPTIONS, "version": "v2"}),
    "fastclip_v3": lambda: FastCLIP(**FASTCLIP_OPTIONS),
    "glofnd": lambda: GloFND(**GLOFND_OPTIONS),
}


def allocated(make: Callable[[], PerSampleObjective], samples: int = SAMPLES) -> PerSampleObjective:
    objective = make()
    objective.allocate(samples)
    return objective


stateful = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@stateful
def test_the_value_of_unseen_pairs_is_that_of_fresh_samples_and_changes_no_state(make):
    objective, fresh = make(), make()
    for each in (objective, fresh):
        each.double().allocate(SAMPLES)
    _train(objective, range(6))
    if isinstance(objective, NUCLR):
        fresh.xi.copy_(objective.xi)  # of the training, and not of a sample
    before = copy.deepcopy(objective.state_dict())
    scores = similarity(random_cosines(99, 6))
    value = objective.value_of_unseen(scores, progress())
    logs = loss_of(fresh.eval(), scores).logs
    assert value == logs["objective_image_anchors"] + logs["objective_text_anchors"]
    assert objective.training and all(torch.equal(objective.state_dict()[name], before[name]) for name in before)


@stateful
def test_a_restored_state_continues_bit_for_bit(make):
    straight, first = allocated(make), allocated(make)
    expected = _train(straight, range(6))
    _train(first, range(3))
    second = allocated(make)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert _train(second, range(3, 6)) == expected[3:]
    for buffer, expected in zip(second.buffers(), straight.buffers(), strict=True):
        assert torch.equal(buffer, expected)


@stateful
def test_evaluation_uses_the_state_without_changing_it(make):
    objective = allocated(make)
    _train(objective, range(3))
    before = copy.deepcopy(objective.state_dict())
    objective.eval()
    losses = _train(objective, range(3, 6))
    assert all(torch.equal(before[name], value) for name, value in objective.state_dict().items())
    assert losses != _train(allocated(make).eval(), range(3, 6))


@stateful
def test_a_sample_not_in_the_batch_keeps_its_state(make):
    objective = allocated(make)
    _train(objective, range(2))
    before = copy.deepcopy(dict(objective.named_buffers()))
    _train(objective, range(2, 3))
    others = [sample for sample in range(SAMPLES) if sample not in ORDER[2]]
    for name, buffer in objective.named_buffers():
        if buffer.shape[-1] == SAMPLES:
            assert torch.equal(buffer[:, others], before[name][:, others])
            assert not torch.equal(buffer, before[name])


@stateful
def test_a_checkpoint_of_another_dataset_and_a_missing_allocation_are_refused(make):
    with pytest.raises(ConfigError, match="allocate"):
        loss_of(make(), similarity(random_cosines(0, 4)))
    small, large = allocated(make, 8), allocated(make, 9)
    with pytest.raises(ConfigError, match=r"for 8 samples, the dataset has 9: data\.shards"):
        large.load_state_dict(small.state_dict())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2, 3, 2], r"sample 2 is twice in one global batch of 4.*data\._target_"),
        ([1, 2, 3, 8], r"sample id 8 is outside the 8 samples of the dataset \(data\.shards\)"),
        ([1, -2, 3, 0], r"sample id -2 is outside"),
    ],
)
@stateful
def test_repeated_and_out_of_range_sample_ids_are_refused(make, ids, message):
    objective = allocated(make)
    with pytest.raises(ConfigError, match=message):
        objective(similarity(random_cosines(0, 4)), batch(ids), progress())
    assert not objective.log_u.isfinite().any()


@pytest.mark.parametrize("gamma", [0.0, 1.5, math.nan])
def test_gamma_outside_0_to_1_is_refused(gamma):
    for kind, options in ((NUCLR, NUCLR_OPTIONS), (SogCLR, SOGCLR_OPTIONS)):
        with pytest.raises(ConfigError, match=f"gamma must be a number above 0 and at most 1, not {gamma}"):
            kind(**{**options, "gamma": gamma})


@pytest.mark.parametrize(("temperature", "tau_plus"), [(0.05, -0.1), (0.5, 1.0)])
def test_an_initial_temperature_and_tau_plus_outside_their_bounds_are_refused(temperature, tau_plus):
    with pytest.raises(ConfigError, match=r"minimum_temperature=0.1, temperature=.*, maximum_temperature=0.45"):
        ISogCLR(**{**ISOGCLR_OPTIONS, "temperature": temperature})
    with pytest.raises(ConfigError, match="DCL: tau_plus must be"):
        DCL(0.1, tau_plus, 0.5, 0.5)


@stateful
def test_statistics_are_nan_for_unseen_samples(make):
    objective = allocated(make)
    _train(objective, range(1))
    for values in objective.sample_statistics().values():
        assert values.isfinite().nonzero()[:, 0].tolist() == sorted(ORDER[0])


def test_popularity_is_zeta_over_tau_and_rises_for_a_contrast_near_all_anchors():
    objective = NUCLR(**{**NUCLR_OPTIONS, "frozen_epochs": 0, "eta_image_factor": 1.0})
    objective.allocate(4)
    matrix = torch.full((4, 4), -0.5)
    matrix[:, 2] = 0.9  # text 2 suits every image
    for step in range(4):
        objective(similarity(matrix), batch([0, 1, 2, 3]), progress(step, 100, 4, 4))
    popularity = objective.sample_statistics()["log_popularity_text"]
    assert popularity.argmax() == 2
    assert torch.allclose(popularity, objective.zeta[1] / NUCLR_OPTIONS["temperature"])


TAU = 0.01
PUBLISHED: dict[str, Any] = {
    **NUCLR_OPTIONS, "temperature": TAU, "zeta": -0.05, "eta": 5e-6, "frozen_epochs": 0,
}  # fmt: skip
COLD = {
    "nuclr": (lambda: NUCLR(**PUBLISHED), 1.0),
    "nuclr_diamond": (lambda: NUCLR(**{**PUBLISHED, "positive": "zeta"}), 1.0),
    "sogclr": (lambda: SogCLR(TAU, 0.8, False), 1.0),
    "sogclr_with_positive": (lambda: SogCLR(TAU, 0.8, True), 1.0),
    "isogclr": (lambda: ISogCLR(TAU, 0.8, 8.0, 1e-5, 0.5, 5.0, 0.005, 0.05), 1.0),
    "fastclip_v0": (lambda: FastCLIP(**{**FASTCLIP_OPTIONS, "temperature": TAU, "version": "v0"}), 1.0),
    "fastclip_v2": (lambda: FastCLIP(**{**FASTCLIP_OPTIONS, "temperature": TAU, "version": "v2"}), 1.0),
    "fastclip_v3": (lambda: FastCLIP(**{**FASTCLIP_OPTIONS, "temperature": TAU, "version": "v3"}), 1.0),
    "dcl": (lambda: DCL(TAU, 0.1, 0.5, 0.5), 1.0),
    "siglip": (lambda: SigLIP(100.0, -10.0, 0.5, 0.5), 1.0),
    "infonce": (lambda: InfoNCE(0.5, 0.5), 1 / TAU),
    "infoloob": (lambda: InfoLOOB(TAU, 1.0, 1.0), 1 / TAU),
    "joint": (Joint, 1 / TAU),
    "rince": (lambda: RINCE(0.1, 0.01, 0.5, 0.5), 1 / TAU),
    "hardness": (lambda: Hardness(TAU, True, 100.0, 9.0, 0.5, 0.5), 1.0),
    "sinkhorn": (lambda: Sinkhorn(5, 1.0, 0.0), 1 / TAU),
}
"""Objectives at temperature 0.01, and the factor on cosines that makes their scores."""


@pytest.mark.parametrize("name", COLD)
def test_nothing_overflows_in_fp32_at_the_smallest_temperature(name):
    make, factor = COLD[name]
    ours, exact = make(), make().double()
    for objective in (ours, exact):
        objective.allocate(1_000_000)
    for step, cosines in enumerate([*_extreme_cosines(), *reversed(_extreme_cosines())]):
        gradients = []
        for objective, dtype in ((ours, torch.float32), (exact, torch.float64)):
            matrix = cosines.to(dtype).requires_grad_()
            loss = loss_of(objective, similarity(factor * matrix), at=progress(step, 100, 1_000_000, 6))
            gradients.append(torch.autograd.grad(loss.total, matrix)[0].double())
            assert loss.total.isfinite() and all(value.isfinite() for value in loss.logs.values())
        scale = gradients[1].abs().max().clamp(min=1.0)
        assert (gradients[0] - gradients[1]).abs().max() < 2e-3 * scale
    for buffer in ours.buffers():
        assert not buffer.isnan().any() and buffer[..., :6].isfinite().all()


def _extreme_cosines() -> list[torch.Tensor]:
    """Positives far below and far above their negatives, everything equal, signs at random, anything."""
    positive_last, positive_first = torch.ones(6, 6), -torch.ones(6, 6)
    positive_last.fill_diagonal_(-1.0)
    positive_first.fill_diagonal_(1.0)
    return [positive_last, positive_first, torch.ones(6, 6), random_cosines(0, 6).sign(), random_cosines(1, 6)]


def _train(objective: PerSampleObjective, steps: range) -> list[float]:
    """The losses of these steps, each on its own scores."""
    losses = []
    for step in steps:
        scores = similarity(random_cosines(step, 4).float())
        loss = objective(scores, batch(ORDER[step]), progress(step, 12, SAMPLES, 4))
        assert math.isfinite(loss.total)
        losses.append(loss.total.item())
    return losses
