"""AmorLIP and NeuCLIP: numbers of golden_next, the fit of their networks, and their state."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from clipzoo.errors import ConfigError
from clipzoo.objectives.amorlip import AmorLIP, FittedObjective, layers
from clipzoo.objectives.neuclip import NeuCLIP
from clipzoo.types import World
from tests.golden_next.test_reweighted import close, in_tiles, read, scores_of
from tests.support.objectives import batch, progress

AMORLIP_OPTIONS: dict[str, Any] = {
    "temperature": 0.07, "max_scale": 100.0, "positive_weight": 1e-3, "rho": 8.5,
    "rho_share": 1 / 3, "beta": 0.8, "beta_epochs": 16, "average_decay": 0.92, "average_every": 2, "width": 6,
    "hidden_factor": 2, "fit_steps": 3, "fit_rate": 1e-3, "seed": 0,
}  # fmt: skip
NEUCLIP_OPTIONS: dict[str, Any] = {
    "temperature": 0.1, "epsilon": 1e-14, "prototypes": 5, "width": 6, "fit_steps": 3, "fit_rate": 1e-2,
}  # fmt: skip
MAKERS: dict[str, Callable[[], FittedObjective]] = {
    "amorlip": lambda: AmorLIP(**AMORLIP_OPTIONS),
    "neuclip": lambda: NeuCLIP(**NEUCLIP_OPTIONS),
}
fitted = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


class GivenPredictions(AmorLIP):
    """Predictions of the last epoch's networks are inputs of the golden numbers."""

    given: Tensor

    def predict(self, weights: Tensor, features: Tensor) -> Tensor:
        return self.given + 0 * weights.sum()


@in_tiles
def test_amorlip_is_that_of_its_code(tile):
    arrays = read("amorlip")
    options = {"positive_weight": arrays["pos_coef"].item(), "rho": arrays["rho"].item(), "beta": arrays["beta"].item()}
    objective = GivenPredictions(**{**AMORLIP_OPTIONS, **options, "beta_epochs": 1}).double()
    objective.given = torch.stack([arrays["log_prev_image"], arrays["log_prev_text"]])
    objective.scale.log_scale.data.copy_(arrays["log_scale"])
    image, text = (arrays[view].clone().requires_grad_() for view in ("image", "text"))
    scores = replace(scores_of(image, text, tile), image=image, text=text)
    loss = objective(scores, batch(list(range(7))), progress(3, samples=14, global_batch=7)).total
    close(loss.detach(), arrays["script_loss"])
    leaves = image, text, objective.scale.log_scale
    for ours, name in zip(torch.autograd.grad(loss, leaves), ("image", "text", "log_scale"), strict=True):
        close(ours, arrays[f"script_grad_{name}"])
    later = objective(scores, batch(list(range(7))), progress(7, samples=28, global_batch=7)).total
    assert later.item() == pytest.approx(loss.item() - 2 * (arrays["rho"] / arrays["log_scale"].exp()).item())


def test_amorlips_network_is_that_of_its_code():
    arrays = read("amorlip")
    names = [f"{layer}_{kind}" for layer in ("fc1", "norm1", "fc2", "norm2", "fc3") for kind in ("weight", "bias")]
    weights = torch.cat([arrays[f"mlp_{name}"].flatten() for name in names])
    objective = AmorLIP(**AMORLIP_OPTIONS)
    given = torch.stack([weights, objective.first_weights(0)[0].double()])
    outputs = objective.predict(given, arrays["mlp_input"].expand(2, -1, -1))
    close(outputs[0], arrays["mlp_output"])
    assert not torch.allclose(outputs[1], outputs[0])


def test_the_first_weights_are_those_of_torch_and_differ_by_epoch_and_modality():
    first, second = AmorLIP(**AMORLIP_OPTIONS).first_weights(0), AmorLIP(**AMORLIP_OPTIONS).first_weights(1)
    sizes = [parameter.numel() for parameter in layers(6, 12)]
    assert first.shape == (2, sum(sizes)) and first[0].split(sizes)[2].eq(1).all()
    assert not torch.equal(first[0], first[1]) and not torch.equal(first, second)


def test_the_fit_takes_adams_steps():
    objective = AmorLIP(**AMORLIP_OPTIONS).double()
    start = torch.randn(objective.network.shape, dtype=torch.float64)
    objective.restart(start)
    weights = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([weights], lr=1e-3)

    def loss(values: Tensor) -> Tensor:
        return (values.square() - values.cos()).sum()

    for _ in range(6):
        optimizer.zero_grad()
        loss(weights).backward()
        optimizer.step()
    objective.fit(loss, World())
    objective.fit(loss, World())
    torch.testing.assert_close(objective.network, weights.detach(), rtol=1e-12, atol=1e-12)


def vectors(seed: int, count: int = 8) -> tuple[Tensor, Tensor]:
    """Unit vectors of pairs that resemble each other, [count, 6] each."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    text = image + torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return functional.normalize(image, dim=1), functional.normalize(text, dim=1)


def train(objective: FittedObjective, steps: range, seed: int | None = None) -> list[float]:
    """Losses of steps with four steps in an epoch. seed: of the pairs; None for new pairs in each step."""
    losses = []
    for step in steps:
        image, text = vectors(step if seed is None else seed)
        scores = replace(scores_of(image, text, None), image=image, text=text)
        losses.append(objective(scores, batch(list(range(8))), progress(step, 20, 32, 8)).total.item())
    return losses


@fitted
def test_a_restored_state_continues_bit_for_bit(make):
    straight, first, second = make(), make(), make()
    expected = train(straight, range(11))
    train(first, range(6))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert train(second, range(6, 11)) == expected[6:]
    assert all(torch.equal(*pair) for pair in zip(second.buffers(), straight.buffers(), strict=True))


@fitted
def test_evaluation_needs_no_embeddings_and_changes_no_state(make):
    objective = make().double()
    train(objective, range(3))
    before = copy.deepcopy(objective.state_dict())
    value = objective.value_of_unseen(scores_of(*vectors(9), None), progress())
    assert value.isfinite() and objective.training
    assert all(torch.equal(before[name], tensor) for name, tensor in objective.state_dict().items())
    with pytest.raises(ConfigError, match="head=cosine"):
        objective(scores_of(*vectors(9), None), batch(list(range(8))), progress())


@fitted
def test_wider_embeddings_are_refused_and_narrower_ones_padded(make):
    objective, (image, text) = make().double(), vectors(0)
    narrow = replace(scores_of(image, text, None), image=image[:, :4], text=text[:, :4])
    assert objective(narrow, batch(list(range(8))), progress()).total.isfinite()
    wide = replace(narrow, image=image.repeat(1, 2), text=text.repeat(1, 2))
    with pytest.raises(ConfigError, match=r"set objective\.width=12"):
        objective(wide, batch(list(range(8))), progress())


def test_the_parameters_of_the_networks_are_not_the_models():
    assert [name for name, _ in AmorLIP(**AMORLIP_OPTIONS).named_parameters()] == ["scale.log_scale"]
    assert not list(NeuCLIP(**NEUCLIP_OPTIONS).parameters())


def test_neuclips_gradient_is_that_of_its_bound_at_the_predicted_normalizers():
    """With the prototypes of the first batch, a = log mean over all columns of exp((s_ij - s_ii) / tau)."""
    options = {**NEUCLIP_OPTIONS, "prototypes": 8, "fit_rate": 1e-12}
    image, text = (view.requires_grad_() for view in vectors(0))
    scores = replace(scores_of(image, text, None), image=image, text=text)
    loss = NeuCLIP(**options).double()(scores, batch(list(range(8))), progress())
    ours = torch.autograd.grad(loss.total, (image, text))
    total = torch.zeros((), dtype=torch.float64)
    for matrix in (image @ text.mT, text @ image.mT):
        differences = (matrix - matrix.diagonal()[:, None]) / 0.1
        means = (differences.exp().sum(dim=1) - 1) / 7
        normalizers = differences.detach().logsumexp(dim=1) - math.log(8)
        total = total + ((-normalizers).exp() * means + normalizers - 1).mean() / 2
    for gradient, expected in zip(ours, torch.autograd.grad(total, (image, text)), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-9)


def test_neuclips_prototypes_approach_the_normalizers():
    objective = NeuCLIP(**NEUCLIP_OPTIONS).double()
    image, text = vectors(3)
    scores = replace(scores_of(image, text, None), image=image, text=text)
    errors = [
        objective(scores, batch(list(range(8))), progress(step, 200, 800, 8)).logs["normalizer_error"].item()
        for step in range(60)
    ]
    assert errors[-1] < errors[0] / 3


def test_amorlip_without_predictions_has_infonces_gradient_of_the_scores():
    """beta = 0 in the first epoch: lambda_i is E_i, and E_i / lambda_i has the gradient of log E_i."""
    objective = AmorLIP(**{**AMORLIP_OPTIONS, "positive_weight": 1.0}).double()
    image, text = (view.requires_grad_() for view in vectors(0))
    scores = replace(scores_of(image, text, None), image=image, text=text)
    ours = torch.autograd.grad(objective(scores, batch(list(range(8))), progress()).total, (image, text))
    scale = objective.scale.log_scale.exp()
    matrix, labels = scale * image @ text.mT, torch.arange(8)
    entropies = functional.cross_entropy(matrix, labels) + functional.cross_entropy(matrix.mT, labels)
    for gradient, expected in zip(ours, torch.autograd.grad(entropies / scale, (image, text)), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
