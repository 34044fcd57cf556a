"""CLOOB's claims about its estimators of mutual information (section 3, appendix A.2), checked on measured rows."""

from __future__ import annotations

import math

from clipzoo.studies.framework.study import Claim, Row

INFONCE, INFOLOOB, HOPFIELD = "InfoNCE", "InfoLOOB", "InfoLOOB with Hopfield"
PAPER = {10.0: (0.67, 0.33), 14.0: (1.00, 0.48)}
"""Published average variances without and with Hopfield, by mutual information in training (section 3, A.2)."""


def claim_saturation(by_kind: dict[str, dict[float, Row]], batch: int) -> Claim:
    estimates = {truth: float(row["estimate"]) for truth, row in by_kind[INFONCE].items()}
    return Claim(
        f"InfoNCE's estimates saturate at log {batch} = {math.log(batch):.2f}.",
        ", ".join(f"{value:.2f} at {truth:g}" for truth, value in estimates.items()),
        max(estimates.values()) <= math.log(batch) and estimates[max(estimates)] > 0.95 * math.log(batch),
    )


def claim_follows(by_kind: dict[str, dict[float, Row]]) -> Claim:
    def mean_error(kind: str) -> float:
        high = [row for truth, row in by_kind[kind].items() if truth > 6]
        return sum(abs(float(row["estimate"]) - float(row["truth"])) for row in high) / len(high)

    errors = {kind: mean_error(kind) for kind in by_kind}
    return Claim(
        "InfoLOOB, with and without Hopfield, estimates high mutual information (above 6 nats) better than InfoNCE.",
        "mean error " + ", ".join(f"{value:.1f} {kind}" for kind, value in errors.items()),
        max(errors[INFOLOOB], errors[HOPFIELD]) < 0.5 * errors[INFONCE],
    )


def claim_steadier(by_kind: dict[str, dict[float, Row]]) -> Claim:
    variances = {
        truth: (float(row["variance"]), float(by_kind[HOPFIELD][truth]["variance"]))
        for truth, row in by_kind[INFOLOOB].items()
        if truth > 6
    }
    return Claim(
        "Hopfield lowers the variance of InfoLOOB's estimates of high mutual information (figure A1).",
        ", ".join(f"from {before:.3f} to {after:.3f} at {truth:g}" for truth, (before, after) in variances.items()),
        all(after < before for before, after in variances.values()),
    )


def claims_variance(rows: list[Row], grid: list[Row]) -> list[Claim]:
    claims = []
    for trained in dict.fromkeys(float(row["trained_at"]) for row in rows):
        variance = {
            kind: {row["truth"]: row["variance"] for row in rows if _is(row, kind, trained)}
            for kind in (INFOLOOB, HOPFIELD)
        }
        without, with_hopfield = (average_variance(rows, kind, trained) for kind in (INFOLOOB, HOPFIELD))
        lower = [truth for truth, value in variance[HOPFIELD].items() if value < variance[INFOLOOB][truth]]
        where = " and ".join(f"{truth:g}" for truth in lower) or "no level"
        plain = {row["inverse_temperature"]: row["average_variance"] for row in grid if _is(row, INFOLOOB, trained)}
        tried = [row for row in grid if _is(row, HOPFIELD, trained)]
        fewer = sum(row["average_variance"] < plain[row["inverse_temperature"]] for row in tried)
        said = "lowers the average variance over all levels"
        if trained in PAPER:
            said += " from {:.2f} to {:.2f}".format(*PAPER[trained])
        claims.append(
            Claim(
                f"Hopfield, in models trained at {trained:g} nats, {said}.",
                f"{without:.2f} without and {with_hopfield:.2f} with (lower with it when tested at {where}); at equal "
                f"inverse temperatures lower with it in {fewer} of the grid's {len(tried)} settings",
                with_hopfield < without,
            )
        )
    return claims


def _is(row: Row, kind: str, trained: float) -> bool:
    return row["estimator"] == kind and row["trained_at"] == trained


def average_variance(rows: list[Row], kind: str, trained: float) -> float:
    """Variance averaged over the tested levels of mutual information."""
    mine = [float(row["variance"]) for row in rows if _is(row, kind, trained)]
    return sum(mine) / len(mine)
