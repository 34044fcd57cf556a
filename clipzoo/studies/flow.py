"""Tracers in random two-dimensional flows ("A mathematical perspective on contrastive learning", section 6.3).

The potential is psi(x, t) = Re sum_k c_k exp(i omega_k t) exp(2 pi i k.x) on the unit torus, k over a square of wave
vectors; a tracer follows the velocity J grad psi, J = [[0, -1], [1, 0]].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipzoo.errors import ConfigError
from clipzoo.types import Count

START = (0.75, 0.75)
Complex = NDArray[np.complex128]
Real = NDArray[np.float64]


@dataclass(frozen=True)
class Flows:
    """largest: wave numbers run from -largest to largest, K = (2 largest + 1)^2 of them.

    speed: root mean square of the velocity. turn: deviation of the frequencies omega_k. duration: T. observations:
    times j T / observations at which a tracer is seen. relative_error: of the solver. seed: of the frequencies.
    """

    largest: int
    speed: float
    turn: float
    duration: float
    observations: Count
    relative_error: float
    seed: int

    @property
    def waves(self) -> Real:
        """[K, 2]."""
        one = np.arange(-self.largest, self.largest + 1, dtype=np.float64)
        return np.stack(np.meshgrid(one, one, indexing="ij"), axis=-1).reshape(-1, 2)

    @property
    def frequencies(self) -> Real:
        """[K], drawn once: all flows share them."""
        return self.turn * np.random.default_rng(self.seed).standard_normal(len(self.waves))

    def draw(self, count: int, seed: int) -> Complex:
        """[n, K], independent standard complex normals, scaled to the speed."""
        generator = np.random.default_rng(seed)
        parts = generator.standard_normal((2, count, len(self.waves)))
        # Re c exp(i phase) has variance |c|^2 / 2, its gradient along k that times (2 pi |k|)^2.
        variance = (2 * math.pi) ** 2 * (self.waves**2).sum()
        return self.speed / math.sqrt(variance) * (parts[0] + 1j * parts[1])

    def potential(self, coefficients: Complex, x: Real, time: float) -> Real:
        """coefficients [K], x [..., 2] -> [...]."""
        phase = np.exp(1j * (2 * math.pi * x @ self.waves.T + self.frequencies * time))
        return (phase @ coefficients).real

    def velocity(self, coefficients: Complex, x: Real, time: float) -> Real:
        """coefficients [n, K], x [n, 2] -> [n, 2]."""
        phase = np.exp(1j * (2 * math.pi * x @ self.waves.T + self.frequencies * time))
        gradient = ((2j * math.pi * coefficients * phase) @ self.waves).real
        return np.stack([-gradient[:, 1], gradient[:, 0]], axis=1)

    def trajectories(self, coefficients: Complex, block: int = 64) -> Real:
        """[n, K] -> [n, observations, 2], where tracers from START are, not brought back to the unit square.

        Dormand and Prince's method of order 8 with steps of its own choice, a block of flows at a time.
        """
        return np.concatenate(
            [self._block(each) for each in np.split(coefficients, range(block, len(coefficients), block))]
        )

    def _block(self, coefficients: Complex) -> Real:
        try:
            from scipy.integrate import solve_ivp
        except ImportError:
            raise ConfigError("the study needs scipy's ODE solver: pip install 'clipzoo[studies]'") from None
        count = len(coefficients)
        times = np.linspace(0.0, self.duration, self.observations + 1)[1:]

        def flat(time: float, state: Real) -> Real:
            return self.velocity(coefficients, state.reshape(count, 2), time).ravel()

        # The solver's error is a mean over the block: one flow may err by the root of the block's size more.
        tolerance = self.relative_error / math.sqrt(count)
        found = solve_ivp(
            flat, (0.0, self.duration), np.tile(START, count), method="DOP853", t_eval=times, rtol=tolerance,
            atol=tolerance,
        )  # fmt: skip
        if not found.success:
            raise RuntimeError(f"the ODE solver stopped: {found.message}")
        return found.y.reshape(count, 2, -1).transpose(0, 2, 1)

    def stepped(self, coefficients: Complex, step: float) -> Real:
        """The same by the classical Runge-Kutta method of order 4 with a fixed step, the paper's way: [n, 2] at T."""
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
        """[n, 2 K] float32, the real parts and then the imaginary ones, of unit variance."""
        both = np.concatenate([coefficients.real, coefficients.imag], axis=1)
        return torch.from_numpy(both / both.std()).float()
