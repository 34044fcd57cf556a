"""The page of one run: report.md with its figures in report/."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipzoo.io import write_whole
from clipzoo.report import render
from clipzoo.report.paper_tables.published import Metrics
from clipzoo.report.run_page import arrays, results_tables
from clipzoo.report.run_page.published_results import result_tables
from clipzoo.report.table import Table
from clipzoo.runs.directory import config_of, is_finished
from clipzoo.runs.metric_key import MetricKey, parsed
from clipzoo.runs.record import RunRecord
from clipzoo.runs.training_log import Line, TrainingLog

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_report(run: Path) -> Path:
    """Write the page of a run directory from its config.yaml, metrics.jsonl, results.json and evaluation/.

    Sections without content are left out. Returns the path of report.md.
    """
    (run / "report").mkdir(parents=True, exist_ok=True)
    write_whole(run / "report.md", render.markdown_page("run_page.md.j2", page=RunPage(run)))
    return run / "report.md"


@dataclass(frozen=True)
class ZeroShotErrors:
    """Errors on one dataset. score: top-1 in words. matrix, mistakes: paths of figures."""

    name: str
    score: str
    confusions: Table
    matrix: str
    mistakes: str


@dataclass(frozen=True)
class RetrievedImages:
    """Images retrieved on one dataset. gallery: number of images. picture: path of the figure."""

    name: str
    score: str
    gallery: int
    picture: str


@dataclass
class RunPage:
    """Content of the page, for the template run_page.md.j2. Figures are drawn when the template asks for them."""

    run: Path
    record: RunRecord | None = field(init=False)
    missing: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.record = RunRecord.read(self.run) if is_finished(self.run) else None
        self.missing = _json(self.run / "evaluation" / "missing.json")
        self._log = TrainingLog.read(self.run)

    @property
    def title(self) -> str:
        return self.run.name

    @property
    def row(self) -> str | None:
        return self.record.row if self.record else None

    @cached_property
    def metrics(self) -> Metrics:
        """Of the record; of an unfinished run, those of its newest evaluation."""
        if self.record and self.record.metrics:
            return self.record.metrics
        evaluated = _json(self.run / "evaluation" / "metrics.json")
        return parsed(_numbers(evaluated or (self._log.evaluations[-1] if self._log.evaluations else {})))

    @property
    def facts(self) -> list[tuple[str, str]]:
        config = config_of(self.run) if (self.run / "config.yaml").exists() else {}
        names = {part: _class_name(config.get(part)) for part in ("encoder", "head", "objective")}
        towers = [_class_name(config.get("encoder", {}).get(tower)) for tower in ("image_tower", "text_tower")]
        if all(towers):
            names["encoder"] = f"{towers[0]}, {towers[1]}"
        trainer, record = config.get("trainer", {}), self.record or RunRecord(seed=config.get("seed"))
        facts = {
            "Experiment": record.experiment,
            "Paper row": record.row,
            **{part.capitalize(): f"`{name}`" for part, name in names.items() if name},
            "Global batch size": trainer.get("global_batch"),
            "Epochs": trainer.get("epochs"),
            "Precision": trainer.get("precision"),
            "Seed": record.seed,
        }
        return [(name, str(value)) for name, value in facts.items() if value is not None]

    @cached_property
    def published(self) -> list[Table]:
        return result_tables(self.metrics, self.missing, self.row)

    @cached_property
    def results(self) -> list[Table]:
        tables = results_tables.zero_shot_table, results_tables.probe_table, results_tables.retrieval_table
        return [table(self.metrics) for table in tables]

    @property
    def cost(self) -> Table:
        return results_tables.cost_table(self.record.training if self.record else {})

    @cached_property
    def curves(self) -> str:
        from clipzoo.report.run_page import figures

        return self._save("training", figures.training_curves(self._log.training)) if self._log.training else ""

    @cached_property
    def evaluation_curves(self) -> str:
        from clipzoo.report.run_page import figures

        if len(self._log.evaluations) < 2:
            return ""
        return self._save("evaluations", figures.evaluation_curves(self._log.evaluations))

    @cached_property
    def zero_shot(self) -> list[ZeroShotErrors]:
        from clipzoo.report.run_page import figures

        parts = []
        for name, content in self._arrays("zero_shot"):
            matrix = self._save(f"confusion_{name}", figures.confusion_matrix(content))
            shown = self._save(f"mistakes_{name}", figures.mistakes(content)) if len(content["images"]) else ""
            score = self._score(MetricKey("zero_shot", name, "", "top1"), "Top-1")
            parts.append(ZeroShotErrors(name, score, arrays.confusions(content), matrix, shown))
        return parts

    @cached_property
    def retrieval(self) -> list[RetrievedImages]:
        from clipzoo.report.run_page import figures

        parts = []
        for name, content in self._arrays("retrieval"):
            picture = self._save(f"retrieval_{name}", figures.retrieved(content))
            key = MetricKey("retrieval", name, "text_to_image", "recall_at_1")
            score = self._score(key, "Text to image, recall@1")
            parts.append(RetrievedImages(name, score, int(content["gallery"]), picture))
        return parts

    @cached_property
    def histograms(self) -> str:
        from clipzoo.report.run_page.sample_figures import sample_histograms

        summary = _json(self.run / "evaluation" / "samples.json")
        return self._save("samples", sample_histograms(summary)) if summary else ""

    @cached_property
    def extremes(self) -> list[tuple[str, str]]:
        """Name and figure of each per-sample statistic."""
        from clipzoo.report.run_page.sample_figures import extreme_samples

        folder = self.run / "evaluation" / "samples"
        if not (folder / "captions.json").exists():
            return []
        summary = _json(self.run / "evaluation" / "samples.json")
        return [(name, self._save(f"samples_{name}", extreme_samples(summary[name], folder))) for name in summary]

    @property
    def program(self) -> str:
        # A model that was only evaluated has no steps of training.
        evaluated = self.record is not None and self.record.training.get("steps") == 0
        return "scripts/evaluate.py" if evaluated else "train.py"

    def _arrays(self, task: str) -> list[tuple[str, arrays.Arrays]]:
        return [(path.stem, arrays.load(path)) for path in sorted((self.run / "evaluation" / task).glob("*.npz"))]

    def _score(self, key: MetricKey, label: str) -> str:
        return f"{label}: **{self.metrics[key]:.1f} %**" if key in self.metrics else ""

    def _save(self, name: str, figure: Figure) -> str:
        """Save a figure and return its path relative to the page."""
        figure.savefig(self.run / "report" / f"{name}.png", dpi=130)
        return f"report/{name}.png"


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _numbers(values: Line) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _class_name(part: object) -> str | None:
    """Name of the class of a `_target_` node."""
    return part["_target_"].rsplit(".", 1)[-1] if isinstance(part, dict) and "_target_" in part else None
