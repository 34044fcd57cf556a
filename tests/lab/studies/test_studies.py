"""The papers' small experiments at sizes for a test: each comes to its end, and what it is judged by is right."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from clipzoo.build import build_part
from clipzoo.config.compose import compose
from clipzoo.lab.studies import half_disc
from clipzoo.lab.studies.digits import load_digits
from clipzoo.lab.studies.gaussian_process import conditional_errors
from clipzoo.lab.studies.gaussian_theorems import Gaussian, learn, optimum, relative_error, shrunk, with_correlations
from clipzoo.lab.studies.lagrangian import START, Flows
from clipzoo.lab.studies.mixture import World, largest_errors, population_loss
from clipzoo.lab.studies.mutual_information import correlated
from clipzoo.lab.studies.rank import least_error, planted_pmi
from clipzoo.lab.studies.run import main, read_result

TINY = {
    "gaussian_plane": ["samples=256", "batch=64", "steps=4", "sign_samples=64", "sign_draws=1"],
    "gaussian_theorems": ["samples=256", "batch=64", "steps=4"],
    "gaussian_process": ["modes=20", "widths=[1,5,6]", "batches=[8,16]", "sizes=[32,64]", "batch=16", "samples=64",
                         "steps=4", "seeds=1", "paths=9"],
    "mutual_information": ["information=[2.0,10.0]", "trained_at=[10.0]", "steps=4", "hidden=[8]", "embed_width=4",
                           "inverse_temperatures=[10.0]", "betas=[8.0]", "validation_batches=2", "test_batches=4"],
    "half_disc": ["sizes=[10,20]", "draws=2", "iterations=60", "nuclr_steps=5", "mini_steps=5", "risk_samples=100",
                  "shown=20", "mini_batch=5"],
    "digits": ["batch=64", "epochs=1", "seeds=1", "candidates=2"],
    "lagrangian": ["flows.observations=6", "flows.largest=1", "samples=64", "test_samples=16", "width=8", "layers=1",
                   "heads=2", "batch=16", "epochs=2", "compared_step=1e-3", "compared_flows=2"],
    "mixture": ["classes=[3,4]", "widths=[2,3]", "item_width=4", "samples=256", "batch=32", "steps=4"],
    "rates": ["population=200", "points=[1,4,16]", "point_draws=400", "features=[16,64]", "feature_draws=400",
              "rate_tolerance=0.05", "size_tolerance=0.1"],
    "rank": ["items=12", "inner_widths=[2,4]", "wpse_widths=[2]", "points=[2]", "item_width=8", "features=16",
             "steps=300", "evaluation_features=32", "small_features=[16,32]", "evaluation_draws=2"],
}  # fmt: skip
MEETS = {"rates": "", "rank": "inner product", "digits": "proposition 6.1", "mixture": "theorem 7",
         "lagrangian": "", "half_disc": "gradient"}  # fmt: skip
"""The closed forms that even a tiny study meets: those whose names begin so. The others are met by tests below."""


@pytest.mark.medium
@pytest.mark.parametrize("name", TINY)
def test_a_tiny_study_comes_to_its_end_and_is_on_the_page(name: str, tmp_path) -> None:
    assert main([f"study={name}", f"folder={tmp_path}", *(f"study.{setting}" for setting in TINY[name])]) == 0
    result = read_result(tmp_path / name)
    assert result is not None and "failed" not in result and result["verdict"]
    page = (tmp_path / "README.md").read_text()
    for figure in result["figures"]:
        assert (tmp_path / name / f"{figure}.png").exists() and f"({name}/{figure}.png)" in page
    for table in result["tables"]:
        assert (tmp_path / name / f"{table}.csv").exists() and f"({name}/{table}.csv)" in page
    assert all(math.isfinite(check["measured"]) for check in result["checks"])
    if name in MEETS:
        closed = [check for check in result["checks"] if check["quantity"].startswith(MEETS[name])]
        assert closed and all(check["met"] for check in closed), closed


def test_the_two_dimensional_example_has_the_papers_optima() -> None:
    plane = Gaussian(*(torch.tensor([[variance]], dtype=torch.float64) for variance in (1.5, 1.0, 1.5)))
    optima = [float(value) for value in (plane.two_sided(), plane.joint(), *plane.one_sided())]
    assert optima == pytest.approx([4 / 9, 1 / 3, 0.8, 8 / 15])
    zero = torch.zeros(1, 1, dtype=torch.float64)
    variances = [float(plane.tilted(tilt, zero, zero).uu) for tilt in (plane.two_sided(), plane.joint())]
    assert variances == pytest.approx([2.7, 2.0])


def test_marginals_of_u_are_inflated_as_corollary_5_7_says() -> None:
    gaussian = with_correlations([0.8, 0.5], 3, 2, seed=0)
    zeros = torch.zeros(3, 3, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    correlations = gaussian.canonical()[1]
    for a, values in ((gaussian.two_sided(), correlations), (gaussian.joint(), shrunk(correlations))):
        torch.testing.assert_close(gaussian.tilted(a, *zeros).uu, gaussian.marginal_of_u(values))


@pytest.mark.medium
@pytest.mark.parametrize("problem", ["two-sided", "one-sided", "joint"])
def test_training_finds_the_optimum_of_each_problem(problem: str) -> None:
    gaussian = with_correlations([0.6, 0.4], 3, 2, seed=0)
    learned = learn(problem, gaussian, 2, samples=4096, batch=256, steps=200, rate=0.1, seed=0)
    a, _, loss = optimum(problem, gaussian, None)
    assert relative_error(gaussian.whitened(learned.a), gaussian.whitened(a)) < 0.1
    assert learned.loss == pytest.approx(loss, abs=0.02)


def test_a_matched_sample_has_exactly_the_covariance() -> None:
    gaussian = with_correlations([0.7, 0.2], 3, 2, seed=1)
    both = torch.cat(gaussian.sample(512, seed=0), dim=1).double()
    torch.testing.assert_close(both.mT @ both / 512, gaussian.covariance, atol=1e-5, rtol=1e-5)


def _study(name: str, *settings: str) -> Any:
    return build_part(compose([f"study={name}", *(f"study.{setting}" for setting in settings)], "studies")["study"])


def test_the_process_has_the_covariance_that_it_states() -> None:
    process = _study("gaussian_process", "modes=50", "places=4", "coefficients=2", "noise=0.05")
    both = torch.cat(process.draw(40_000, seed=0), dim=1).double()
    scale = process.gaussian().covariance.diag().sqrt()
    error = (both.mT @ both / len(both) - process.gaussian().covariance) / (scale[:, None] * scale)
    assert float(error.abs().max()) < 0.03


def test_conditional_errors_are_expectations_over_the_conditioning_variable() -> None:
    gaussian = with_correlations([0.7, 0.5], 3, 2, seed=0)
    assert max(conditional_errors(gaussian, gaussian.two_sided())) < 1e-12
    a = 0.5 * gaussian.two_sided()
    # Half of the right A gives half of the right mean: a quarter of its square is missed, on both sides.
    assert conditional_errors(gaussian, a) == pytest.approx((0.25, 0.25))


def test_no_width_of_the_process_passes_for_its_neighbour() -> None:
    process = _study("gaussian_process")
    of_v = [conditional_errors(process.gaussian(), process.gaussian().two_sided(width))[1] for width in range(1, 6)]
    assert min(a - b for a, b in zip(of_v, of_v[1:], strict=False)) > process.tolerance


def test_correlated_gaussians_hold_the_mutual_information_asked_for() -> None:
    x, y = correlated(10.0, 20, 50_000, seed=0)
    correlation = (x * y).mean(dim=0)
    assert float(-0.5 * torch.log1p(-(correlation**2)).sum()) == pytest.approx(10.0, rel=0.02)


def test_the_half_discs_true_risk_is_that_of_its_samples() -> None:
    x, y = half_disc.draw_pairs(100_000, 0.2, seed=0)
    losses = 0.2 * half_disc.log_partition(x, 0.2) - (x * y).sum(dim=1)
    assert float(losses.mean()) == pytest.approx(half_disc.true_risk(0.2), abs=4 * float(losses.std()) / 316)


def test_the_popularity_found_is_a_stationary_point() -> None:
    x, y = half_disc.draw_pairs(40, 0.5, seed=0)
    zeta = 0.5 * half_disc.estimated_popularity(x @ y.mT, 0.5, 300).log()
    energies = (x @ y.mT).numpy()

    def objective(shifted: np.ndarray) -> float:
        inner = np.log(np.exp((energies - shifted) / 0.5).sum(axis=1))
        return float((0.5 * inner - np.diag(energies)).mean() + shifted.mean())

    least = objective(zeta.numpy())
    generator = np.random.default_rng(0)
    assert all(objective(zeta.numpy() + 0.1 * generator.standard_normal(40)) > least for _ in range(20))


def test_the_mixture_worlds_pmi_has_the_least_loss() -> None:
    here = World(4)
    pmi = here.pmi.clamp_min(-50.0)
    assert float(here.joint.sum()) == pytest.approx(1.0)
    assert population_loss(pmi, here) == pytest.approx(-here.information, abs=1e-9)
    # A constant in the scores changes nothing; e^-50 represents no density.
    assert largest_errors(pmi + 3, here.pmi)[1] == pytest.approx(0.0, abs=1e-9)
    other = pmi + 0.1 * torch.randn(pmi.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert population_loss(other, here) > -here.information


def test_no_matrix_of_low_rank_and_constant_is_nearer_than_the_closed_form() -> None:
    planted = planted_pmi(16, 6.0, 0.05)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(16, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    for _ in range(100):  # alternating least squares, the constant as one more column
        ones = torch.ones(16, 1, dtype=torch.float64)
        constant = (planted - left @ right.mT).mean()
        left = torch.linalg.lstsq(right, (planted - constant).mT).solution.mT
        right = torch.linalg.lstsq(left, planted - constant * ones @ ones.mT).solution.mT
    error = planted - left @ right.mT
    reached = float((error - error.mean()).square().mean().sqrt())
    assert least_error(planted, 3) <= reached * (1 + 1e-9)
    assert reached < 1.05 * least_error(planted, 3)


def flows(**changes) -> Flows:
    setting = dict(largest=2, speed=10.0, turn=30.0, duration=0.1, observations=5, relative_error=1e-8, seed=0)
    return Flows(**{**setting, **changes})


def test_the_velocity_is_the_turned_gradient_of_the_potential() -> None:
    coefficients, x, small = flows().draw(1, seed=1), np.array([0.3, 0.8]), 1e-6
    right, up = np.array([small, 0]), np.array([0, small])

    def change(step: np.ndarray) -> float:
        ends = (flows().potential(coefficients[0], x + sign * step, 0.02) for sign in (1, -1))
        return float(np.subtract(*ends)) / (2 * small)

    velocity = flows().velocity(coefficients, x[None], 0.02)[0]
    np.testing.assert_allclose(velocity, [-change(up), change(right)], rtol=1e-5)


def test_two_solvers_of_the_flow_agree() -> None:
    coefficients = flows().draw(3, seed=1)
    np.testing.assert_allclose(
        flows().trajectories(coefficients)[:, -1], flows().stepped(coefficients, 1e-3), atol=1e-3
    )


def test_the_potential_of_a_steady_flow_is_constant_along_a_path() -> None:
    steady = flows(turn=0.0)
    coefficients = steady.draw(2, seed=1)
    for own, path in zip(coefficients, steady.trajectories(coefficients), strict=True):
        np.testing.assert_allclose(
            steady.potential(own, path, 0.0), steady.potential(own, np.array(START), 0.0), atol=1e-6
        )


def test_the_velocity_has_the_speed_asked_for() -> None:
    coefficients = flows().draw(4000, seed=0)
    velocity = flows().velocity(coefficients, np.tile(START, (4000, 1)), 0.0)
    assert math.sqrt((velocity**2).sum(axis=1).mean()) == pytest.approx(10.0, rel=0.05)


def test_digits_are_split_once_and_look_like_mnist() -> None:
    (images, labels), (others, other_labels) = load_digits(None, 0.25, seed=0)
    assert images.shape[1:] == others.shape[1:] == (1, 28, 28)
    assert len(images) + len(others) == 1797 and len(others) == 449
    assert 0 <= float(images.min()) < float(images.max()) <= 1
    assert set(labels.tolist()) == set(other_labels.tolist()) == set(range(10))
