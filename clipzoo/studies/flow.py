"""Tracers in random two-dimensional flows ("A mathematical perspective on contrastive learning", section 6.3).

The potential is psi(x, t) = Re sum_k c_k exp(i omega_k t) exp(2 pi i k.x) on the unit torus, k over a square of wave
vectors; a tracer follows the velocity J grad psi, J = [[0, -1], [1, 0]].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipzoo.config.vocabulary import Count, Positive, Range, Seed
from clipzoo.errors import ConfigError, installation
from clipzoo.types import Part

START = (0.75, 0.75)
Complex = NDArray[np.complex128]
Real = NDArray[np.float64]


@dataclass(frozen=True)
class Flows(Part):
    """A random flow on the unit torus with K = (2 largest + 1)^2 wave vectors.

    largest: wave numbers run from -largest to largest.

    speed: root mean square of the velocity. turn: standard deviation of the frequencies omega_k. duration: T.
    observations: number of observation times j T / observations. relative_error: tolerance of the solver. seed: of the
    frequencies.
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
        generator = np.random.default_rng(seed)
        parts = generator.standard_normal((2, count, len(self.waves)))
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
        return np.concatenate(
            [self._block(flows) for flows in np.split(coefficients, range(block, len(coefficients), block))]
        )

    def _block(self, coefficients: Complex) -> Real:
        try:
            from scipy.integrate import solve_ivp
        except ImportError:
            raise ConfigError(f"this study needs scipy's ODE solver: {installation('studies')}") from None
        count = len(coefficients)
        times = np.linspace(0.0, self.duration, self.observations + 1)[1:]

        def flat(time: float, state: Real) -> Real:
            return self.velocity(coefficients, state.reshape(count, 2), time).ravel()

        # The solver bounds the mean error over the block; one flow may err by sqrt(count) more.
        tolerance = self.relative_error / math.sqrt(count)
        solution = solve_ivp(
            flat, (0.0, self.duration), np.tile(START, count), method="DOP853", t_eval=times, rtol=tolerance,
            atol=tolerance,
        )  # fmt: skip
        if not solution.success:
            raise RuntimeError(f"the ODE solver stopped: {solution.message}")
        return solution.y.reshape(count, 2, -1).transpose(0, 2, 1)

    def stepped(self, coefficients: Complex, step: float) -> Real:
        """Positions [n, 2] at time T by the Runge-Kutta method of order 4 with a fixed step, as in the paper."""
        x = np.tile(np.array(START), (len(coefficients), 1))
        for index in range(round(self.duration / step)):
            time = index * step
            first = self.velocity(coefficients, x, time)
            second = self.velocity(coefficients, x + step / 2 * first, time + step / 2)
            third = self.velocity(coefficients, x + step / 2 * second, time + step / 2)
            fourth = self.velocity(coefficients, x + step * third, time + step)
            x = x + step / 6 * (first + 2 * second + 2 * third + fourth)
        return x

    def standardised(self, coefficients: Complex) -> Tensor:
        """Real parts, then imaginary parts, scaled to unit variance: [n, K] -> [n, 2 K] float32."""
        both = np.concatenate([coefficients.real, coefficients.imag], axis=1)
        return torch.from_numpy(both / both.std()).float()
