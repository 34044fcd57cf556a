"""Exact identities between objectives, and a closed form."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from clipzoo.heads.wpse import GaussianKernel
from clipzoo.objectives.conditional import Conditional
from clipzoo.objectives.cyclip import CyCLIP
from clipzoo.objectives.dcl import DCL
from clipzoo.objectives.infoloob import InfoLOOB
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.objectives.joint import Joint
from clipzoo.objectives.mmd import MMDConditional
from clipzoo.objectives.nuclr import NUCLR
from clipzoo.objectives.siglip import SigLIP
from clipzoo.objectives.sogclr import SogCLR
from tests.support.objectives import NUCLR_OPTIONS, ORDER, SAMPLES, batch, loss_of, progress, random_cosines, similarity

N = 6


def test_conditional_with_both_weights_is_clips_loss_minus_log_n():
    scores = similarity(4 * random_cosines(0, N), 4 * random_cosines(1, N))
    difference = loss_of(InfoNCE(0.5, 0.5), scores).total - loss_of(Conditional(1.0, 1.0), scores).total
    assert difference.item() == pytest.approx(math.log(N), abs=1e-14)


def test_joint_loss_bounds_conditional_loss_and_equals_it_for_exchangeable_samples():
    for seed in range(20):
        matrix = (1 + seed) * random_cosines(seed, N)
        for weights in ((1.0, 1.0), (2.0, 0.0), (0.0, 2.0)):
            scores = similarity(matrix)
            assert loss_of(Conditional(*weights), scores).total <= loss_of(Joint(), scores).total + 1e-12
    # Jensen's inequality is tight: a circulant matrix has one and the same row sum.
    first = random_cosines(0, 1, N)[0]
    scores = similarity(torch.stack([first.roll(shift) for shift in range(N)]))
    assert loss_of(Joint(), scores).total.item() == pytest.approx(loss_of(Conditional(1, 1), scores).total.item())


def test_infoloobs_gradient_is_infonces_over_one_minus_the_positives_probability():
    matrix = (3 * random_cosines(0, N)).requires_grad_()
    one_direction = 1.0, 0.0
    (nce,) = torch.autograd.grad(loss_of(InfoNCE(*one_direction), similarity(matrix)).total, matrix)
    (loob,) = torch.autograd.grad(loss_of(InfoLOOB(1.0, *one_direction), similarity(matrix)).total, matrix)
    probability = matrix.softmax(dim=1).diagonal()[:, None]
    assert torch.allclose(loob, nce / (1 - probability), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("objective", [InfoNCE(1.0, 0.0), InfoLOOB(1.0, 1.0, 0.0), Conditional(0.0, 2.0)])
def test_a_direction_of_weight_zero_is_not_computed(objective):
    matrix = random_cosines(0, 5)
    loss = loss_of(objective, similarity(matrix, torch.full((5, 5), torch.nan)))
    assert loss.total.isfinite() and set(loss.logs) == {"loss_image_to_text"}


def test_infoloob_with_cloobs_arguments_is_tau_times_the_sum_of_both_terms():
    first, second = 30 * random_cosines(0, N), 30 * random_cosines(1, N)

    def loob(scores: Tensor) -> Tensor:
        negatives = scores[~torch.eye(N, dtype=torch.bool)].view(N, N - 1)
        return (negatives.logsumexp(dim=1) - scores.diagonal()).mean()

    total = loss_of(InfoLOOB(1 / 30, 1.0, 1.0), similarity(first, second)).total
    assert total.item() == pytest.approx(((loob(first) + loob(second)) / 30).item(), rel=1e-12)


def test_nuclr_without_popularity_is_the_global_contrastive_loss_with_its_positive():
    options = {**NUCLR_OPTIONS, "zeta": 0.0, "xi": 0.0, "learn_zeta": False}
    nuclr, sogclr = NUCLR(**options).double(), SogCLR(options["temperature"], options["gamma"], True).double()
    for objective in (nuclr, sogclr):
        objective.allocate(SAMPLES)
    for step, ids in enumerate(ORDER):
        matrix = random_cosines(step, len(ids)).requires_grad_()
        losses = [objective(similarity(matrix), batch(ids), progress(step)).total for objective in (nuclr, sogclr)]
        gradients = [torch.autograd.grad(loss, matrix)[0] for loss in losses]
        assert torch.allclose(*gradients, rtol=1e-12, atol=1e-15)
    assert torch.allclose(nuclr.log_u, sogclr.log_u, rtol=1e-13)


def test_sogclr_without_memory_on_the_whole_dataset_has_infonces_gradient():
    """gamma 1, n = N: the estimator is the gradient of tau times InfoNCE of both directions, added."""
    tau = 0.1
    sogclr = SogCLR(tau, 1.0, positive_in_denominator=True).double()
    sogclr.allocate(N)
    matrix = random_cosines(0, N).requires_grad_()
    (ours,) = torch.autograd.grad(loss_of(sogclr, similarity(matrix)).total, matrix)
    (expected,) = torch.autograd.grad(tau * loss_of(InfoNCE(1.0, 1.0), similarity(matrix / tau)).total, matrix)
    assert torch.allclose(ours, expected, rtol=1e-11, atol=1e-14)


def test_a_constant_on_every_zeta_leaves_the_diamond_variants_gradient_unchanged():
    gradients = []
    for constant in (0.0, 0.3, -0.2):
        options = {**NUCLR_OPTIONS, "zeta": constant, "positive": "zeta", "frozen_epochs": 0}
        objective = NUCLR(**options).double()
        objective.allocate(SAMPLES)
        gradients_of_rows = []
        for step, ids in enumerate(ORDER):
            matrix = random_cosines(step, len(ids)).requires_grad_()
            gradients_of_rows.append(
                torch.autograd.grad(objective(similarity(matrix), batch(ids), progress(step)).total, matrix)[0]
            )
        gradients.append(torch.stack(gradients_of_rows))
    for shifted in gradients[1:]:
        assert torch.allclose(gradients[0], shifted, rtol=1e-9, atol=1e-12)


def test_dcl_without_debiasing_is_infonce_and_siglip_of_a_symmetric_head_the_same_in_both_directions():
    matrix = random_cosines(0, N)
    expected = loss_of(InfoNCE(0.5, 0.5), similarity(matrix / 0.1)).total.item()
    assert loss_of(DCL(0.1, 0.0, 0.5, 0.5), similarity(matrix)).total.item() == pytest.approx(expected, rel=1e-12)
    logs = loss_of(SigLIP(None, -1.0, 0.5, 0.5).double(), similarity(matrix)).logs
    assert logs["loss_image_to_text"].item() == pytest.approx(logs["loss_text_to_image"].item(), rel=1e-13)


def test_cyclip_without_consistency_terms_is_clips_loss_and_they_are_zero_for_equal_geometries():
    matrix = random_cosines(0, N)
    within = random_cosines(1, N), random_cosines(2, N)
    ours = loss_of(CyCLIP(0.5, False, 100.0, 0.0, 0.0), similarity(matrix, within=within)).total
    assert ours.item() == pytest.approx(loss_of(InfoNCE(0.5, 0.5), similarity(2 * matrix)).total.item(), rel=1e-12)
    symmetric = (matrix + matrix.mT) / 2
    loss = loss_of(CyCLIP(0.5, False, 100.0, 7.0, 9.0), similarity(symmetric, within=(matrix, matrix)))
    assert loss.logs["loss_in_modal"] == 0 and loss.logs["loss_cross_modal"] == 0


def test_conditional_mmd_with_an_equality_kernel_is_the_brier_score():
    """k(u, u') = 1 for u = u', else 0: half |p_i - e_i|^2 - 1/2."""
    matrix = 3 * random_cosines(0, N)
    narrow = GaussianKernel(1e-3)
    objective = MMDConditional(0.0, 1.0, narrow, narrow, median_unit=False, exclude_diagonal=False)
    views = torch.arange(N)[:, None].double()
    total = objective(similarity(matrix), batch(list(range(N)), views, views), progress()).total
    brier = (matrix.softmax(dim=1) - torch.eye(N)).square().sum(dim=1).mean()
    assert total.item() == pytest.approx((brier / 2 - 0.5).item(), abs=1e-12)


def test_one_sided_optimum_of_a_gaussian_pair_is_the_conditional_covariance():
    """Theorem 5.3 on the paper's 2-D example: u given v, scores -(g u - h v)^2 / 2, A = g h = .8, B = g^2 = .5333.

    The loss there is minus the mutual information, log(1 - (2/3)^2) / 2.
    """
    covariance = torch.tensor([[1.5, 1.0], [1.0, 1.5]], dtype=torch.float64)
    pairs = _gaussian_pairs(1024, covariance)
    encoders = torch.tensor([0.5, 0.5], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([encoders], max_iter=15, line_search_fn="strong_wolfe")
    objective = Conditional(lambda_u=2.0, lambda_v=0.0)

    def loss() -> Tensor:
        optimizer.zero_grad()
        g, h = encoders
        scores = -((g * pairs[:, None, 0] - h * pairs[None, :, 1]) ** 2) / 2
        total = loss_of(objective, similarity(scores)).total
        total.backward()
        return total

    optimizer.step(loss)
    g, h = encoders.detach().tolist()
    assert g * h == pytest.approx(0.8, rel=0.02)
    assert g * g == pytest.approx(8 / 15, rel=0.02)
    assert loss().item() == pytest.approx(math.log(5 / 9) / 2, rel=0.02)


def _gaussian_pairs(count: int, covariance: Tensor) -> Tensor:
    """[count, 2] evenly spread draws with exactly this sample covariance."""
    uniform = torch.quasirandom.SobolEngine(2, scramble=True, seed=0).draw(count, dtype=torch.float64)
    normal = torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6))
    normal = normal - normal.mean(dim=0)
    whitening = torch.linalg.inv(torch.linalg.cholesky(normal.mT @ normal / count))
    return normal @ whitening.mT @ torch.linalg.cholesky(covariance).mT
