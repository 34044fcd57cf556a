"""The parts of the benchmark of a GPU, in order of their importance: an early end leaves out the last ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.recording import Recorder


@dataclass(frozen=True)
class Part:
    """title: what the part does. limit: seconds after which it is ended. expected: seconds on an H100.

    runs: arguments of `measure` beside the recorder, for each of the part's processes, which run at the same time.
    on_cpu: environment variables where the device is a CPU.
    """

    title: str
    measure: Callable[..., None]
    limit: float
    expected: float
    runs: tuple[tuple[str, ...], ...] = ((),)
    on_cpu: tuple[tuple[str, str], ...] = ()


def _machine(recorder: Recorder) -> None:
    from bench.machine import measure

    measure(recorder)


def _kernels(recorder: Recorder, operation: str, products: str) -> None:
    from bench.kernels import measure

    measure(recorder, operation, products)


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


OPERATIONS = ("kme", "log_sum_exps", "negative_sums", "sigmoid_loss")
"""Modules of clipzoo.ops.triton. Each is proved in processes of its own: a fault on a GPU ends all that follows it."""
PRODUCTS = ("fp32", "tf32", "bf16")
PARTS: dict[str, Part] = {
    "machine": Part("the machine and its rates", _machine, 60, 15),
    "kernels": Part(
        "Triton's kernels beside float64", _kernels, 150, 80,
        tuple((operation, products) for operation in OPERATIONS for products in PRODUCTS), (("TRITON_INTERPRET", "1"),),
    ),
    "heads": Part("training steps of every head", _heads, 200, 120),
    "scores": Part("objectives and scores alone", _scores, 75, 40),
    "probe": Part("the linear probe's search", _probe, 110, 70),
    "loader": Part("loading beside training", _loader, 70, 40),
    "compile": Part("training steps with torch.compile", _compile, 240, 90),
}  # fmt: skip
