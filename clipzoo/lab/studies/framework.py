"""The base class of studies, their results, and the encoders and the training of their models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from clipzoo.data.in_memory import InMemoryDataset
from clipzoo.encoders.base import Encoder
from clipzoo.heads.base import Head
from clipzoo.lab.methods.judge import agreement
from clipzoo.lab.studies.figures import Drawing
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.training.optimizers import adam
from clipzoo.training.settings import Computation, Precision
from clipzoo.training.train import train
from clipzoo.types import Count, Features, Part, Rate, Seed

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
        return abs(self.measured - self.expected) / (abs(self.expected) if self.relative else 1.0)

    @property
    def met(self) -> bool:
        return self.error <= self.tolerance

    @staticmethod
    def count(checks: Sequence[Check]) -> str:
        return f"{sum(check.met for check in checks)} of {len(checks)} closed forms are met"


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, the measurement, and the verdict."""

    says: str
    measured: str
    borne_out: bool

    @staticmethod
    def count(claims: Sequence[Claim]) -> str:
        return f"{sum(claim.borne_out for claim in claims)} of {len(claims)} claims are borne out"


@dataclass(frozen=True)
class Findings:
    """Results of a study.

    verdict: one sentence. tables: name -> rows, written as CSV. drawings: name -> figure, written as PNG.
    """

    verdict: str
    checks: list[Check]
    claims: list[Claim]
    tables: Mapping[str, list[Row]]
    drawings: Mapping[str, Drawing]


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


@dataclass(frozen=True)
class AdamStudy(Study):
    """A study whose trainings share settings of Adam: batch, steps, rate; see `fit`. seed: the first seed."""

    batch: Count
    steps: Count
    rate: Rate
    seed: Seed


class Views(Encoder):
    """One network per view, [b, ...] -> [b, width], or tokens [b, M, width], of which the first is the pooled one."""

    def __init__(self, image: nn.Module, text: nn.Module, image_width: int, text_width: int) -> None:
        super().__init__()
        self.image_width, self.text_width = image_width, text_width
        self.image_network, self.text_network = image, text

    def image(self, image: Tensor) -> Features:
        return self._features(self.image_network(image))

    def text(self, text: Tensor) -> Features:
        return self._features(self.text_network(text))

    def _features(self, outputs: Tensor) -> Features:
        return Features(outputs) if outputs.ndim == 2 else Features(outputs[:, 0], outputs)


def vectors(image_width: int, text_width: int) -> Views:
    """Identity on both views: the head's projections are then linear encoders."""
    return Views(nn.Identity(), nn.Identity(), image_width, text_width)


def fit(
    encoder: Callable[[], Encoder],
    head: Callable[[], Head],
    objective: Objective,
    image: Tensor,
    text: Tensor,
    *,
    steps: int,
    batch: int,
    rate: float,
    seed: int,
    precision: Precision = "float32",
    device: Literal["auto", "cpu"] = "cpu",
    watch: Callable[[Model], Mapping[str, float]] | None = None,
) -> Model:
    """Train with Adam for `steps` steps of `batch` pairs, the rate falling from `rate` to 0 along a cosine.

    encoder, head: called to build them; both draw their initial weights from `seed`. image, text: the two views of all
    pairs. watch: called with the model after each epoch and at the end.
    """
    torch.manual_seed(seed)
    towers = encoder()
    torch.manual_seed(seed)
    return train(
        Model(towers, head()), objective, InMemoryDataset(image, text), batch=batch, steps=steps,
        optimizer=adam(rate), evaluate=watch, device=device, seed=seed, log_every=steps, quiet=True,
        computation=Computation(precision=precision, tile=None, loss_limit=1e6),
    ).model  # fmt: skip


def all_scores(model: Model, items: int) -> Tensor:
    """Scores of every image item with every text item, [m, m] float64."""
    all_items = torch.arange(items)
    with torch.no_grad():
        return model.similarity(model.encode_image(all_items), model.encode_text(all_items)).double()


def select(rows: Iterable[Row], **values: object) -> list[Row]:
    """Return the rows that have these values."""
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def pmi_agreement(scores: ArrayLike, pmi: ArrayLike, weights: ArrayLike) -> dict[str, float]:
    """Return the columns of a table that say how well scores follow the PMI; see `clipzoo.lab.methods.judge`."""
    values = agreement(scores, pmi, weights)
    return {"mean_error" if name == "error" else name: value for name, value in values.items()}
