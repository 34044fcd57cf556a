"""Lagrangian data assimilation of the perspective, section 6.3: retrieval of a flow from the path of one tracer.

The potential is psi(x, t) = Re sum_k c_k exp(i omega_k t) exp(2 pi i k.x) on the unit torus, k over a square of wave
vectors; a tracer follows the velocity J grad psi, J = [[0, -1], [1, 0]].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from scipy.integrate import solve_ivp
from torch import Tensor, nn

from clipzoo.evaluation.scoring import positions, score_blocks
from clipzoo.heads.vector import ClipHead
from clipzoo.lab.studies.figures import BLUE, VERMILION, Drawing, line, panels
from clipzoo.lab.studies.framework import Check, Claim, Findings, Row, Study, Views, fit, select
from clipzoo.model import Model
from clipzoo.objectives.conditional import Conditional
from clipzoo.types import Count, Embedding, Layers, NonNegative, Part, Positive, Range, Rate, Scale, Seed, concatenate

DIRECTIONS = {"coefficients to trajectories": "to_trajectories", "trajectories to coefficients": "to_coefficients"}
SPLITS = {"train": VERMILION, "test": BLUE}
START = (0.75, 0.75)
Complex = NDArray[np.complex128]
Real = NDArray[np.float64]


@dataclass(frozen=True)
class Lagrangian(Study):
    """Train embeddings of flows and trajectories and measure retrieval in both directions.

    flows: distribution of the flows and their tracers. samples, test_samples: number of training pairs and of pairs of
    the retrieval test. width, layers, heads: size of the trajectory transformer. batch, epochs, rate: settings of Adam.
    temperature, max_scale: settings of the head. precision, device: those of the training. compared_step: step of the
    Runge-Kutta method with which the solver is compared on compared_flows flows. solver_tolerance: tolerance of the
    final position. conserved_tolerance: tolerance of the potential along a path in a steady flow, relative to its
    standard deviation.
    """

    flows: Flows
    samples: Count
    test_samples: Count
    width: Count
    layers: Layers
    heads: Count
    batch: Count
    epochs: Count
    rate: Rate
    temperature: Scale
    max_scale: Positive
    precision: Literal["bf16", "float32"]
    device: Literal["auto", "cpu"]
    compared_step: Positive
    compared_flows: Count
    solver_tolerance: NonNegative
    conserved_tolerance: NonNegative
    seed: Seed

    title = "Lagrangian data assimilation"
    source = "A mathematical perspective on contrastive learning, section 6.3, figures 13 to 15"
    question = (
        "A tracer is followed in a random, time-dependent flow whose potential has K Fourier coefficients. The "
        "coefficients are their own embedding; a transformer over the tracer's places learns the other one with the "
        "two-sided loss on cosines. Does a trajectory find its flow among all others, and a flow its trajectory?"
    )
    differs = (
        "The setting is small by default: fewer coefficients, observations, samples and layers; "
        "`study=lagrangian_paper` has the paper's sizes (K = 49, 1,000 observations, 32,268 samples, 12 layers).",
        "The paper gives neither the law of the coefficients nor of the frequencies: here both are normal, and the "
        "velocity's root mean square is a setting. The coefficient of the constant mode moves no tracer.",
        "Trajectories come from scipy's adaptive method of order 8, compared with the paper's Runge-Kutta method. The "
        "rate is higher than the paper's and falls to zero.",
    )

    def run(self) -> Findings:
        all_coefficients = self.flows.draw(self.samples + self.test_samples, self.seed)
        test = all_coefficients[self.samples :]
        shifted = self.flows.trajectories(all_coefficients) - np.array(START)
        tracers = torch.from_numpy(shifted / shifted.std()).float()
        # Real parts, then imaginary parts, scaled to unit variance: [n, 2 K].
        parts = np.concatenate([all_coefficients.real, all_coefficients.imag], axis=1)
        coefficients = torch.from_numpy(parts / parts.std()).float()
        views = {
            "train": (coefficients[: self.test_samples], tracers[: self.test_samples]),
            "test": (coefficients[self.samples :], tracers[self.samples :]),
        }
        rows: list[Row] = []

        def watch(model: Model) -> Mapping[str, float]:
            # Called after each epoch, and once more at the end.
            for name, pairs in views.items():
                scores = scores_of(model, *pairs)
                matches = torch.arange(len(scores), device=scores.device)
                recalls = {
                    f"{direction}_at_{depth}": float((positions(matrix, matches) < depth).double().mean())
                    for direction, matrix in zip(DIRECTIONS.values(), (scores, scores.mT), strict=True)
                    for depth in (1, 5)
                }
                rows.append({"epoch": 1 + len(rows) // len(SPLITS), "split": name, **recalls})
            return {}

        count = coefficients.shape[1]

        def encoder() -> Views:
            network = TrajectoryNetwork(self.flows.observations, self.width, self.layers, self.heads)
            return Views(nn.Identity(), network, count, self.width)

        def head() -> ClipHead:
            head = ClipHead(count, self.width, count, self.temperature, self.max_scale, True)
            # g_u is prescribed: the coefficients as they are.
            head.image_projection.requires_grad_(False).copy_(torch.eye(count))
            return head

        model = fit(
            encoder, head, Conditional(lambda_u=1.0, lambda_v=1.0), coefficients[: self.samples],
            tracers[: self.samples], steps=self.epochs * self.samples // self.batch, batch=self.batch, rate=self.rate,
            seed=self.seed, precision=self.precision, device=self.device, watch=watch,
        )  # fmt: skip
        sample = test[: self.compared_flows]
        distance = np.abs(self.flows.trajectories(sample)[:, -1] - self.flows.stepped(sample, self.compared_step)).max()
        steady = replace(self.flows, turn=0.0)
        changes = [
            np.abs(steady.potential(own, path, 0.0) - steady.potential(own, np.array(START), 0.0)).max()
            / np.sqrt((np.abs(own) ** 2).sum() / 2)
            for own, path in zip(sample, steady.trajectories(sample), strict=True)
        ]
        solver = f"solver against Runge-Kutta of order 4 with step {self.compared_step:g}: largest distance at the end"
        change = "change of the potential along a path when the flow is steady, in deviations of the potential"
        checks = [
            Check(solver, float(distance), 0.0, self.solver_tolerance),
            Check(change, float(max(changes)), 0.0, self.conserved_tolerance),
        ]
        first, last, train_first, train_last = rows[1], rows[-1], rows[0], rows[-2]
        keys = [f"{direction}_at_{depth}" for direction in DIRECTIONS.values() for depth in (1, 5)]

        def said(row: Row, depth: int) -> str:
            return " and ".join(f"{100 * row[f'{direction}_at_{depth}']:.1f} %" for direction in DIRECTIONS.values())

        claims = [
            Claim(
                "Retrieval improves in both directions during training, on training and test data (figure 14).",
                f"test R@1 from {said(first, 1)} after the first epoch to {said(last, 1)}, among {self.test_samples}",
                all(last[key] > first[key] and train_last[key] > train_first[key] for key in keys),
            ),
            Claim(
                "R@5 approaches 100 %.",
                f"test R@5 {said(last, 5)}, training {said(train_last, 5)}",
                all(last[key] > 0.95 for key in keys if key.endswith("5")),
            ),
            Claim(
                "Accuracy is generally higher for trajectories from potentials than for potentials from trajectories.",
                f"test R@1 {said(last, 1)}, R@5 {said(last, 5)}",
                all(last[f"to_trajectories_at_{depth}"] > last[f"to_coefficients_at_{depth}"] for depth in (1, 5)),
            ),
        ]
        verdict = (
            f"Among {self.test_samples} test pairs R@1 is {100 * last['to_trajectories_at_1']:.1f} % from coefficients "
            f"to trajectories and {100 * last['to_coefficients_at_1']:.1f} % back, R@5 "
            f"{100 * last['to_trajectories_at_5']:.1f} % and {100 * last['to_coefficients_at_5']:.1f} %; "
            f"{Claim.count(claims)}."
        )
        scores = scores_of(model, *views["test"]).mT.cpu()
        drawings = self._drawings(rows, all_coefficients[:2], test, scores)
        return Findings(verdict, checks, claims, {"retrieval": rows}, drawings)

    def _drawings(
        self, rows: list[Row], shown: np.ndarray, coefficients: np.ndarray, scores: Tensor
    ) -> dict[str, Drawing]:
        """Draw the flows `shown`, the retrieval accuracies, and an example; scores: of test trajectories with flows."""
        grid = np.stack(np.meshgrid(*[np.linspace(0, 1, 65)] * 2, indexing="ij"), axis=-1)

        def draw_path(axis: Axes, flow: np.ndarray, own: np.ndarray) -> None:
            """Draw the potential of a flow and the path of the tracer of `own`, wrapped to the unit square."""
            axis.contourf(*grid.transpose(2, 0, 1), self.flows.potential(flow, grid, 0.0), 12, cmap="viridis")
            axis.set(xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[], aspect="equal")
            wrapped = np.concatenate([[START], replace(self.flows, observations=2000).trajectories(own[None])[0]]) % 1.0
            jumps = (np.abs(np.diff(wrapped, axis=0)) > 0.5).any(axis=1)
            wrapped = np.insert(wrapped, np.flatnonzero(jumps) + 1, np.nan, axis=0)
            axis.plot(*wrapped.T, color="white", linewidth=1.5)
            axis.plot(*START, "o", color="white", markersize=4)

        flows, axes = panels(1, 2, 3.4, 3.0)
        for axis, flow in zip(axes, shown, strict=True):
            draw_path(axis, flow, flow)
            axis.set(xlabel="x₁", ylabel="x₂", xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])

        retrieval, axes = panels(2, 2, 3.4, 2.4, sharex=True)
        for place, (title, direction) in enumerate(DIRECTIONS.items()):
            for axis, depth in zip(axes[2 * place :], (1, 5), strict=False):
                for split, colour in SPLITS.items():
                    split_rows = select(rows, split=split)
                    line(axis.plot, split_rows, "epoch", f"{direction}_at_{depth}", "-", color=colour, label=split)
                axis.set(ylim=(0, 1), ylabel=f"R@{depth}", xlabel="epoch" if place else "")
                axis.set_title(title, fontsize=9)
                axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[0].legend(frameon=False)

        # A trajectory whose own flow is not ranked first, and the four flows ranked first.
        order = positions(scores, torch.arange(len(scores)))
        missed = (order > 0).nonzero().flatten()
        query = int(missed[order[missed].argmin()]) if len(missed) else 0
        ranked = scores[query].argsort(descending=True)[:4].tolist()
        titles = [f"found: {place}" + (" (its own)" if index == query else "") for place, index in enumerate(ranked, 1)]
        example, axes = panels(1, 5, 2.3, 2.7)
        for axis, index, title in zip(axes, [query, *ranked], ["its own", *titles], strict=True):
            draw_path(axis, coefficients[index], coefficients[query])
            axis.set_title(title, fontsize=10)
        paths = (
            "Figure 13: two potentials at t = 0 (high: yellow) and the trajectories of their tracers (white, from the "
            "dot) on the periodic unit square."
        )
        first = (
            "Figure 15: a test trajectory (white) that does not find its own potential first, on that potential and on "
            "the four that it finds."
        )
        accuracy = "Figure 14: retrieval accuracy during training."
        return {"flows": (flows, paths), "retrieval": (retrieval, accuracy), "example": (example, first)}


class TrajectoryNetwork(nn.Module):
    """A transformer over the positions of a tracer, [b, L, 2] -> [b, width], pooled at the last token."""

    def __init__(self, observations: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.lift = nn.Linear(2, width)
        self.positions = nn.Parameter(0.02 * torch.randn(observations, width))
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        # Nested tensors speed up padded rows; these rows have no padding.
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, path: Tensor) -> Tensor:
        return self.blocks(self.lift(path) + self.positions)[:, -1]


@torch.no_grad()
def scores_of(model: Model, coefficients: Tensor, tracers: Tensor, block: int = 512) -> Tensor:
    """Scores of n flows with n trajectories, [n, n]."""
    image: list[Embedding] = [model.encode_image(rows) for rows in coefficients.split(block)]
    text: list[Embedding] = [model.encode_text(rows) for rows in tracers.split(block)]
    return torch.cat([scores for _, scores in score_blocks(model, concatenate(image), concatenate(text))])


@dataclass(frozen=True)
class Flows(Part):
    """A random flow on the unit torus with K = (2 largest + 1)^2 wave vectors.

    largest: wave numbers run from -largest to largest. speed: root mean square of the velocity. turn: standard
    deviation of the frequencies omega_k. duration: T. observations: number of observation times j T / observations.
    relative_error: tolerance of the solver. seed: seeds the frequencies.
    """

    largest: Count
    speed: Positive
    turn: Positive
    duration: Positive
    observations: Count
    relative_error: Annotated[float, Range(at_least=1e-12, at_most=1)]
    seed: Seed

    @property
    def waves(self) -> Real:
        """Wave vectors, [K, 2]."""
        one = np.arange(-self.largest, self.largest + 1, dtype=np.float64)
        return np.stack(np.meshgrid(one, one, indexing="ij"), axis=-1).reshape(-1, 2)

    @property
    def frequencies(self) -> Real:
        """Frequencies [K], drawn once and shared by all flows."""
        return self.turn * np.random.default_rng(self.seed).standard_normal(len(self.waves))

    def draw(self, count: int, seed: int) -> Complex:
        """Draw coefficients [n, K]: independent complex normals, scaled to `speed`."""
        parts = np.random.default_rng(seed).standard_normal((2, count, len(self.waves)))
        # Re c exp(i phase) has variance |c|^2 / 2, its gradient along k that times (2 pi |k|)^2.
        variance = (2 * math.pi) ** 2 * (self.waves**2).sum()
        return self.speed / math.sqrt(variance) * (parts[0] + 1j * parts[1])

    def potential(self, coefficients: Complex, x: Real, time: float) -> Real:
        """Potential psi at time t: coefficients [K], x [..., 2] -> [...]."""
        phase = np.exp(1j * (2 * math.pi * x @ self.waves.T + self.frequencies * time))
        return (phase @ coefficients).real

    def velocity(self, coefficients: Complex, x: Real, time: float) -> Real:
        """Velocity J grad psi: coefficients [n, K], x [n, 2] -> [n, 2]."""
        phase = np.exp(1j * (2 * math.pi * x @ self.waves.T + self.frequencies * time))
        gradient = ((2j * math.pi * coefficients * phase) @ self.waves).real
        return np.stack([-gradient[:, 1], gradient[:, 0]], axis=1)

    def trajectories(self, coefficients: Complex, block: int = 64) -> Real:
        """Positions of tracers that start at START, [n, K] -> [n, observations, 2], not wrapped to the unit square.

        Dormand and Prince's adaptive method of order 8, `block` flows at a time.
        """
        times = np.linspace(0.0, self.duration, self.observations + 1)[1:]
        paths = []
        for flows in np.split(coefficients, range(block, len(coefficients), block)):
            # The solver bounds the mean error over the block; one flow may err by sqrt(n) more.
            tolerance = self.relative_error / math.sqrt(len(flows))
            solution = solve_ivp(
                lambda time, state, flows: self.velocity(flows, state.reshape(-1, 2), time).ravel(),
                (0.0, self.duration), np.tile(START, len(flows)), method="DOP853", t_eval=times, rtol=tolerance,
                atol=tolerance, args=(flows,),
            )  # fmt: skip
            if not solution.success:
                raise RuntimeError(f"the ODE solver stopped: {solution.message}")
            paths.append(solution.y.reshape(len(flows), 2, -1).transpose(0, 2, 1))
        return np.concatenate(paths)

    def stepped(self, coefficients: Complex, step: float) -> Real:
        """Positions [n, 2] at time T by the Runge-Kutta method of order 4 with a fixed step, as in the paper."""
        x = np.tile(np.array(START), (len(coefficients), 1))
        for index in range(round(self.duration / step)):
            time = index * step
            total = slope = np.zeros_like(x)
            for share, weight in ((0.0, 1), (0.5, 2), (0.5, 2), (1.0, 1)):
                slope = self.velocity(coefficients, x + share * step * slope, time + share * step)
                total = total + weight * slope
            x = x + step / 6 * total
        return x
