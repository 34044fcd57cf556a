"""Every stateless objective against its formula in plain Python: values by loops, gradients by complex steps."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable

import pytest
import torch

from clipzoo.heads.wpse import GaussianKernel, InverseMultiquadricKernel
from clipzoo.objectives.base import Objective
from clipzoo.objectives.conditional import Conditional
from clipzoo.objectives.cyclip import CyCLIP
from clipzoo.objectives.dcl import DCL
from clipzoo.objectives.infoloob import InfoLOOB
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.objectives.joint import Joint
from clipzoo.objectives.mmd import MMDConditional, MMDJoint, kernel_matrix
from clipzoo.objectives.siglip import SigLIP
from tests.support.objectives import batch, progress, random_cosines, similarity

N = 5
Matrix = list[list[complex]]
IMAGES = [[0.1, 0.4], [1.3, -0.2], [0.3, 0.9], [-0.7, 0.2], [0.5, 0.5]]
TEXTS = [[3, 7, 0], [7, 7, 2], [9, 0, 0], [2, 3, 0], [3, 9, 0]]
"""Token ids, 0 is padding."""


def infonce(a: Matrix, b: Matrix, *_: Matrix) -> complex:
    return 0.3 * _cross_entropy(a) + 0.7 * _cross_entropy(b)


def infoloob(a: Matrix, b: Matrix, *_: Matrix) -> complex:
    def loob(s: Matrix) -> complex:
        terms = [sum(cmath.exp(s[i][j]) for j in range(N) if j != i) for i in range(N)]
        return sum(-s[i][i] + cmath.log(terms[i]) for i in range(N)) / N

    return (loob(a) + 0.5 * loob(b)) / 30


def conditional(a: Matrix, b: Matrix, *_: Matrix) -> complex:
    """a is anchored on images u: its rows are log rho(v|u); b on texts v: log rho(u|v)."""

    def log_density(s: Matrix, i: int) -> complex:
        return s[i][i] - cmath.log(sum(cmath.exp(s[i][j]) for j in range(N)) / N)

    u_given_v = sum(log_density(b, i) for i in range(N)) / N
    v_given_u = sum(log_density(a, i) for i in range(N)) / N
    return -(0.4 * u_given_v + 1.6 * v_given_u) / 2


def joint(a: Matrix, b: Matrix, *_: Matrix) -> complex:
    def one(s: Matrix) -> complex:
        mean_positive = sum(s[i][i] for i in range(N)) / N
        return -mean_positive + cmath.log(sum(cmath.exp(score) for row in s for score in row) / N**2)

    return (one(a) + one(b)) / 2


def siglip(a: Matrix, b: Matrix, *_: Matrix, scale: float | None = None, bias: float = -2.0) -> complex:
    scale = _stored(10.0) if scale is None else scale

    def one(s: Matrix) -> complex:
        total = 0j
        for i in range(N):
            for j in range(N):
                label = 1 if i == j else -1
                total += cmath.log(1 + cmath.exp(-label * (scale * s[i][j] + bias)))
        return total / N

    return 0.25 * one(a) + 0.75 * one(b)


def siglip_on_logits(a: Matrix, b: Matrix, *_: Matrix) -> complex:
    return siglip(a, b, scale=1.0)


def dcl(a: Matrix, b: Matrix, *_: Matrix, tau: float = 0.5, tau_plus: float = 0.1) -> complex:
    def one(s: Matrix) -> complex:
        total = 0j
        for i in range(N):
            positive = cmath.exp(s[i][i] / tau)
            negatives = sum(cmath.exp(s[i][j] / tau) for j in range(N) if j != i)
            corrected = (negatives - (N - 1) * tau_plus * positive) / (1 - tau_plus)
            floor = (N - 1) * math.exp(-1 / tau)
            corrected = corrected if corrected.real > floor else floor
            total -= cmath.log(positive / (positive + corrected))
        return total / N

    return 0.5 * one(a) + 0.5 * one(b)


def dcl_at_its_floor(a: Matrix, b: Matrix, *_: Matrix) -> complex:
    return dcl(a, b, tau=0.2, tau_plus=0.45)


def cyclip(a: Matrix, b: Matrix, images: Matrix, texts: Matrix) -> complex:
    scaled = [[[score * _stored(5.0) for score in row] for row in s] for s in (a, b)]
    total = (_cross_entropy(scaled[0]) + _cross_entropy(scaled[1])) / 2
    for i in range(N):
        for j in range(N):
            total += 0.3 * (a[i][j] - b[i][j]) ** 2 / N + 0.2 * (images[i][j] - texts[i][j]) ** 2 / N
    return total


def mmd_conditional(a: Matrix, b: Matrix, *_: Matrix, exclude: bool = False) -> complex:
    def one(s: Matrix, kernel: list[list[float]]) -> complex:
        pairs = N - 1 if exclude else N
        total = 0j
        for i in range(N):
            partition = sum(cmath.exp(s[i][j]) for j in range(N)) / N
            rho = [cmath.exp(s[i][j]) / partition for j in range(N)]
            for j in range(N):
                for k in range(N):
                    if not (exclude and j == k):
                        total += 0.5 * kernel[j][k] * rho[j] * rho[k] / (N * N * pairs)
                if not (exclude and i == j):
                    total -= kernel[i][j] * rho[j] / (N * pairs)
        return total

    return 0.4 * one(b, _kernel(IMAGES, _gaussian)) + 1.6 * one(a, _kernel(_bags(), _multiquadric))


def mmd_conditional_without_diagonal(a: Matrix, b: Matrix, *_: Matrix) -> complex:
    return mmd_conditional(a, b, exclude=True)


def mmd_joint(a: Matrix, b: Matrix, *_: Matrix) -> complex:
    def one(s: Matrix, rows: list[list[float]], columns: list[list[float]]) -> complex:
        partition = sum(cmath.exp(score) for row in s for score in row)
        p = [[cmath.exp(score) / partition for score in row] for row in s]
        pairs = [(i, j) for i in range(N) for j in range(N)]
        total = 0j
        for i, j in pairs:
            for k, m in pairs:
                total += p[i][j] * p[k][m] * rows[i][k] * columns[j][m]
            for k in range(N):
                total -= 2 / N * p[i][j] * rows[k][i] * columns[k][j]
        return total

    images, texts = _kernel(IMAGES, _gaussian, median=True), _kernel(_bags(), _multiquadric, median=True)
    return (one(a, images, texts) + one(b, texts, images)) / 2


KERNELS = {"image_kernel": GaussianKernel(0.8), "text_kernel": InverseMultiquadricKernel(1.1)}
CASES: dict[Callable, Objective] = {
    infonce: InfoNCE(0.3, 0.7),
    infoloob: InfoLOOB(1 / 30, 1.0, 0.5),
    conditional: Conditional(0.4, 1.6),
    joint: Joint(),
    siglip: SigLIP(10.0, -2.0, 0.25, 0.75),
    siglip_on_logits: SigLIP(None, -2.0, 0.25, 0.75),
    dcl: DCL(0.5, 0.1, 0.5, 0.5),
    dcl_at_its_floor: DCL(0.2, 0.45, 0.5, 0.5),
    cyclip: CyCLIP(0.2, False, 100.0, in_modal=0.2, cross_modal=0.3),
    mmd_conditional: MMDConditional(0.4, 1.6, **KERNELS, median_unit=False, exclude_diagonal=False),
    mmd_conditional_without_diagonal: MMDConditional(0.4, 1.6, **KERNELS, median_unit=False, exclude_diagonal=True),
    mmd_joint: MMDJoint(**KERNELS, median_unit=True),
}


@pytest.mark.parametrize("oracle", CASES, ids=lambda oracle: oracle.__name__)
def test_value_and_gradient_agree_with_the_formula(oracle):
    objective = CASES[oracle].double()
    # Two unrelated matrices, as a Hopfield head has them: a swapped direction cannot hide.
    matrices = [random_cosines(seed, N).requires_grad_() for seed in range(4)]
    first, second, *within = matrices
    of = batch(list(range(N)), torch.tensor(IMAGES, dtype=torch.float64), torch.tensor(TEXTS))
    total = objective(similarity(first, second, (within[0], within[1])), of, progress()).total
    gradients = torch.autograd.grad(total, matrices, materialize_grads=True)

    plain: list[Matrix] = [matrix.tolist() for matrix in matrices]
    assert abs(total.item() - oracle(*plain).real) < 1e-10
    for matrix, gradient in enumerate(gradients):
        for i in range(N):
            for j in range(N):
                assert abs(gradient[i, j].item() - _derivative(oracle, plain, matrix, i, j)) < 1e-10


def test_siglip_learns_its_bias_and_scale():
    objective = SigLIP(10.0, -2.0, 0.25, 0.75).double()
    first, second = random_cosines(0, N), random_cosines(1, N)
    objective(similarity(first, second), batch(list(range(N))), progress()).total.backward()
    plain, step = (first.tolist(), second.tolist()), 1e-30
    bias = siglip(*plain, bias=complex(-2.0, step)).imag / step
    log_scale = siglip(*plain, scale=_stored(10.0) * cmath.exp(complex(0, step))).imag / step
    assert abs(objective.bias.grad.item() - bias) < 1e-10
    assert abs(objective.scale.log_scale.grad.item() - log_scale) < 1e-10


def test_cyclip_keeps_a_learnable_scale_below_its_maximum():
    objective = CyCLIP(0.07, True, 100.0, in_modal=0.25, cross_modal=0.25)
    with torch.no_grad():
        objective.scale.log_scale.fill_(9.0)
    matrix = random_cosines(0, N).float()
    objective(similarity(matrix, matrix.mT, (matrix, matrix)), batch(list(range(N))), progress()).total.backward()
    assert objective.scale.log_scale.item() == pytest.approx(math.log(100))
    assert objective.scale.log_scale.grad != 0


# Kernels between raw inputs: distances and rounding.


def drawn(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def test_samples_far_from_the_origin_keep_their_distances_in_fp32():
    views = drawn(6, 20)
    near = kernel_matrix(views, GaussianKernel(1.0), False, torch.float32)
    far = kernel_matrix(views + 1000, GaussianKernel(1.0), False, torch.float32)
    torch.testing.assert_close(far, near, rtol=0, atol=1e-3)  # the sum itself is rounded to 6e-5
    views[1, 2] = math.nan
    assert kernel_matrix(views, GaussianKernel(1.0), True, torch.float32).isnan().any()


def test_images_are_compared_as_fractions_of_255():
    image = (256 * drawn(5, 3, 4, 4)).to(torch.uint8)
    fractions = image.double().flatten(1) / 255
    expected = torch.exp(-(torch.cdist(fractions, fractions) ** 2) / 2)
    torch.testing.assert_close(kernel_matrix(image, GaussianKernel(1.0), False, torch.float64), expected)


def test_captions_are_compared_as_bags_of_words_without_padding():
    captions = torch.tensor([[5, 7, 7, 0, 0, 0], [7, 5, 7, 0, 0, 0], [5, 7, 7, 5, 7, 7]])
    values = kernel_matrix(captions, GaussianKernel(1.0), False, torch.float64)
    assert values[0, 1] == 1 and values[0, 2] == pytest.approx(math.exp(-(1**2 + 2**2) / 2))


@pytest.mark.parametrize("kernel", [GaussianKernel(1.0), InverseMultiquadricKernel(1.0)])
@pytest.mark.parametrize("width", [97, 3072])
def test_equal_samples_have_distance_zero_in_a_batch_of_mostly_equal_samples(kernel, width):
    views = drawn(3, width)[[0] * 8 + [1, 2]]
    values = kernel_matrix(views, kernel, True, torch.float32)
    assert (values[:8, :8] == 1).all() and (values.diagonal() == 1).all()
    assert (values[:8, 8:] == 0).all()


def _stored(scale: float) -> float:
    """The parameter is the scale's logarithm, made in fp32."""
    return math.exp(torch.tensor(math.log(scale)).item())


def _derivative(oracle: Callable, matrices: list[Matrix], matrix: int, i: int, j: int) -> float:
    """By a complex step: exact to rounding, without subtraction."""
    step = 1e-30
    moved = [[list(row) for row in matrix] for matrix in matrices]
    moved[matrix][i][j] += complex(0, step)
    return oracle(*moved).imag / step


def _cross_entropy(s: Matrix) -> complex:
    return sum(-cmath.log(cmath.exp(s[i][i]) / sum(cmath.exp(score) for score in s[i])) for i in range(N)) / N


def _bags() -> list[list[float]]:
    vocabulary = sorted({token for row in TEXTS for token in row} - {0})
    return [[float(row.count(token)) for token in vocabulary] for row in TEXTS]


def _gaussian(squared: float) -> float:
    return math.exp(-squared / (2 * 0.8**2))


def _multiquadric(squared: float) -> float:
    return 1.1 / math.sqrt(1.1**2 + squared)


def _kernel(samples: list[list[float]], value: Callable[[float], float], median: bool = False) -> list[list[float]]:
    squared = [[math.dist(x, y) ** 2 for y in samples] for x in samples]
    # Of an even number of distances torch takes the lower of the two in the middle.
    unit = sorted(squared[i][j] for i in range(N) for j in range(i))[(N * (N - 1) // 2 - 1) // 2] if median else 1.0
    return [[value(distance / unit) for distance in row] for row in squared]
