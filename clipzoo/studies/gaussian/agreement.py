"""Agreement of scores with the pointwise mutual information (PMI) of a Gaussian, in closed form.

The PMI and the scores of linear encoders are quadratic forms z^T M z + constant of z = (u, v). Under a centred Gaussian
of covariance S, E z^T M z = tr(M S) and Cov(z^T M z, z^T N z) = 2 tr(M S N S).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clipzoo.studies.gaussian.closed_forms import Gaussian


def pmi_form(gaussian: Gaussian) -> Tensor:
    """M of the PMI log p(u, v) - log p(u) p(v), without its constant."""
    return -(gaussian.covariance.inverse() - torch.block_diag(gaussian.uu.inverse(), gaussian.vv.inverse())) / 2


def score_form(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """M of the score <u, A v> - <u, B u> / 2 - <v, C v> / 2."""
    return torch.cat([torch.cat([-b, a], dim=1), torch.cat([a.mT, -c], dim=1)]) / 2


@dataclass(frozen=True)
class ExactAgreement:
    """slope, mean_error, calibrated_error: slope, error and calibrated_error of `clipzoo.studies.lab.agreement`."""

    slope: float
    mean_error: float
    calibrated_error: float


def exact_agreement(gaussian: Gaussian, form: Tensor) -> ExactAgreement:
    """Compare a score with the PMI; half of the weight is on pairs of the Gaussian and half on independent ones."""
    pmi = pmi_form(gaussian)
    sides = [gaussian.covariance, torch.block_diag(gaussian.uu, gaussian.vv)]

    def covariance(first: Tensor, second: Tensor) -> float:
        means = [[float((form @ side).trace()) for side in sides] for form in (first, second)]
        inner = [2 * float((first @ side @ second @ side).trace()) for side in sides]
        products = [value + one * other for value, one, other in zip(inner, *means, strict=True)]
        return sum(products) / 2 - sum(means[0]) * sum(means[1]) / 4

    spread = covariance(form, form)
    slope = covariance(form, pmi) / spread if spread > 0 else 0.0
    error, rest = (max(covariance(kind, kind), 0.0) ** 0.5 for kind in (form - pmi, slope * form - pmi))
    return ExactAgreement(slope, error, rest)
