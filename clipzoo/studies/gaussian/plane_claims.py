"""Claims of the perspective about its two-dimensional example, checked on measured moments."""

from __future__ import annotations

from collections.abc import Mapping

from clipzoo.studies.framework.study import Claim


def plane_claims(rows: Mapping[str, Mapping[str, float]]) -> list[Claim]:
    truth = rows["truth"]

    def off(model: str, moment: str) -> float:
        return abs(rows[model][moment] / truth[moment] - 1)

    divergences = {name: rows[name]["kl_from_truth"] for name in rows if name != "truth"}
    joint_nearest = min(divergences, key=divergences.__getitem__) == "joint"
    marginals = {name: off(name, "variance_of_u") for name in ("two-sided", "joint")}
    return [
        Claim(
            "Two-sided: both conditional means are right, both conditional variances too large (figure 2).",
            f"mean {rows['two-sided']['slope_of_u_given_v']:.3f} for {truth['slope_of_u_given_v']:.3f}, "
            f"variance {rows['two-sided']['variance_of_u_given_v']:.3f} for {truth['variance_of_u_given_v']:.3f}",
            off("two-sided", "slope_of_u_given_v") < 0.05
            and off("two-sided", "slope_of_v_given_u") < 0.05
            and rows["two-sided"]["variance_of_u_given_v"] > 1.2 * truth["variance_of_u_given_v"],
        ),
        Claim(
            "One-sided: mean and variance of u given v are right, those of v given u are not (figure 3).",
            f"variance of u given v {rows['one-sided']['variance_of_u_given_v']:.3f}, of v given u "
            f"{rows['one-sided']['variance_of_v_given_u']:.3f}, for {truth['variance_of_u_given_v']:.3f}",
            off("one-sided", "variance_of_u_given_v") < 0.05 < off("one-sided", "variance_of_v_given_u"),
        ),
        Claim(
            "Joint: the marginal variances are nearer the truth than with the two-sided loss, conditional means are "
            "biased (figure 4).",
            f"variance of u {rows['joint']['variance_of_u']:.2f} against {rows['two-sided']['variance_of_u']:.2f}, for "
            f"{truth['variance_of_u']:.2f}; mean of u given v = 1: {rows['joint']['slope_of_u_given_v']:.3f}",
            marginals["joint"] < marginals["two-sided"] and off("joint", "slope_of_u_given_v") > 0.05,
        ),
        Claim(
            "Of the three losses the joint one gives the nearest approximation of the target (figure 5).",
            "KL from the truth: " + ", ".join(f"{name} {value:.3f}" for name, value in divergences.items()),
            joint_nearest,
        ),
        Claim(
            "The normalised encoder captures the positive correlation and, in one dimension, both marginals exactly "
            "(figure 6).",
            f"marginal variance {rows['normalised']['variance_of_u']:.4f} for {truth['variance_of_u']:.4f}",
            off("normalised", "variance_of_u") < 1e-3 and rows["normalised"]["slope_of_u_given_v"] > 0,
        ),
    ]
