"""The base class of studies, their results, and the training of their models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from clipzoo.encoders.base import Encoder
from clipzoo.heads.base import Head
from clipzoo.lab.methods.judge import Agreement
from clipzoo.lab.studies.figures import Drawing
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.training.optimizers import adam
from clipzoo.training.parts import Dataset
from clipzoo.training.settings import Computation, Precision
from clipzoo.training.train import train
from clipzoo.types import Part

Row = Mapping[str, Any]
"""One row of a table: strings and numbers by column."""


@dataclass(frozen=True)
class Check:
    """A measured quantity against its closed form.

    tolerance: allowed distance, set in the study's configuration before anything is measured.
    relative: the distance is relative to the closed form.
    """

    quantity: str
    measured: float
    expected: float
    tolerance: float
    relative: bool = False

    @property
    def error(self) -> float:
        distance = abs(self.measured - self.expected)
        return distance / abs(self.expected) if self.relative else distance

    @property
    def met(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, the measurement, and the verdict."""

    says: str
    measured: str
    borne_out: bool


@dataclass(frozen=True)
class Findings:
    """Results of a study.

    verdict: one sentence. tables: name -> rows, written as CSV. drawings: name -> figure, written as PNG.
    """

    verdict: str
    checks: list[Check]
    claims: list[Claim]
    tables: Mapping[str, list[Row]]
    drawings: Mapping[str, Drawing] = field(default_factory=dict)


class Study(Part, ABC):
    """One experiment of a paper, at a size that two CPU cores can run. The constructor's arguments are its settings.

    title: heading on the page. source: paper and section. question: the question and the method, in a few sentences.
    differs: differences from the paper's setting, one sentence per difference.
    """

    title: str
    source: str
    question: str
    differs: tuple[str, ...] = ()

    @abstractmethod
    def run(self) -> Findings:
        """Run the study. The result depends only on the settings and is reproducible on one machine."""


def fit(
    encoder: Encoder,
    head: Head,
    objective: Objective,
    data: Dataset,
    *,
    steps: int,
    batch: int,
    rate: float,
    seed: int,
    final_rate: float = 0.0,
    precision: Precision = "float32",
    watch: Callable[[Model], Mapping[str, float]] | None = None,
    epochs_between: float = 1.0,
    device: Literal["auto", "cpu"] = "cpu",
) -> Model:
    """Train with Adam for `steps` steps of `batch` pairs, the rate falling from `rate` to `final_rate` along a cosine.

    watch: called with the model every `epochs_between` epochs and at the end.
    """
    return train(
        Model(encoder, head),
        objective,
        data,
        batch=batch,
        steps=steps,
        optimizer=adam(rate, final_rate),
        evaluate=watch,
        evaluate_every=epochs_between,
        computation=Computation(precision=precision, tile=None, loss_limit=1e6),
        device=device,
        seed=seed,
        log_every=steps,
        quiet=True,
    ).model


def seeded(build: Callable[[], Any], seed: int) -> Any:
    """Return `build()`, with initial weights drawn from `seed`."""
    torch.manual_seed(seed)
    return build()


def all_scores(model: Model, items: int) -> Tensor:
    """Scores of every image item with every text item, [m, m] float64."""
    everything = torch.arange(items)
    with torch.no_grad():
        return model.similarity(model.encode_image(everything), model.encode_text(everything)).double()


def select(rows: Iterable[Row], **values: object) -> list[Row]:
    """Return the rows that have these values."""
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def count_met(checks: Sequence[Check]) -> str:
    return f"{sum(check.met for check in checks)} of {len(checks)} closed forms are met"


def count_borne_out(claims: Sequence[Claim]) -> str:
    return f"{sum(claim.borne_out for claim in claims)} of {len(claims)} claims are borne out"


def agreement_columns(found: Agreement) -> dict[str, float]:
    """Return the columns of a table that say how well a score follows the PMI."""
    return {
        "rank_correlation": found.rank_correlation, "slope": found.slope, "mean_error": found.error,
        "calibrated_error": found.calibrated_error,
    }  # fmt: skip
