"""The parts of the benchmark of a GPU, in order of their importance: an early end leaves out the last ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench.recording import Recorder


@dataclass(frozen=True)
class Part:
    """title: what the part does. limit: seconds after which it is ended. expected: seconds on an H100.

    on_cpu: environment variables where the device is a CPU.
    """

    title: str
    measure: Callable[[Recorder], None]
    limit: float
    expected: float
    on_cpu: tuple[tuple[str, str], ...] = ()


def _machine(recorder: Recorder) -> None:
    from bench.machine import measure

    measure(recorder)


def _kernels(recorder: Recorder, operation: str) -> None:
    from bench.kernels import measure

    measure(recorder, operation)


def _heads(recorder: Recorder) -> None:
    from bench.heads import measure

    measure(recorder)


def _compile(recorder: Recorder) -> None:
    from bench.heads import measure_compiled

    measure_compiled(recorder)


def _scores(recorder: Recorder) -> None:
    from bench.scores import measure

    measure(recorder)


def _probe(recorder: Recorder) -> None:
    from bench.probe import measure

    measure(recorder)


def _loader(recorder: Recorder) -> None:
    from bench.loader import measure

    measure(recorder)


INTERPRETED = (("TRITON_INTERPRET", "1"),)
OPERATIONS = ("kme", "log_sum_exps", "negative_sums", "sigmoid_loss")
"""Modules of clipzoo.ops.triton. Each is proved in a process of its own: a fault on a GPU ends all that follows it."""
PARTS: dict[str, Part] = {
    "machine": Part("the machine and its rates", _machine, 60, 15),
    **{
        name: Part(f"Triton's kernels of {name} beside float64", partial(_kernels, operation=name), 60, 20, INTERPRETED)
        for name in OPERATIONS
    },
    "heads": Part("training steps of every head", _heads, 200, 120),
    "scores": Part("objectives and scores alone", _scores, 75, 40),
    "probe": Part("the linear probe's search", _probe, 110, 70),
    "loader": Part("loading beside training", _loader, 70, 40),
    "compile": Part("training steps with torch.compile", _compile, 240, 90),
}
