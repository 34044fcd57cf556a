"""The page of one run: report.md with its figures in report/."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipzoo.io import write_whole
from clipzoo.report import render
from clipzoo.report.escaping import markdown_code
from clipzoo.report.paper_tables.published import Metrics
from clipzoo.report.run_page import arrays, results_tables
from clipzoo.report.run_page.published_results import result_tables
from clipzoo.runs.directory import config_of, is_finished
from clipzoo.runs.metric_key import MetricKey, parsed
from clipzoo.runs.record import RunRecord
from clipzoo.runs.training_log import TrainingLog

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_report(run: Path) -> Path:
    """Write the page of a run directory from its config.yaml, metrics.jsonl, results.json and evaluation/.

    Sections without content are left out. Returns the path of report.md.
    """
    # matplotlib takes half a second to import.
    from clipzoo.report.run_page import figures

    (run / "report").mkdir(parents=True, exist_ok=True)
    record = RunRecord.read(run) if is_finished(run) else None
    log, missing = TrainingLog.read(run), _json(run / "evaluation" / "missing.json")
    metrics, row = _metrics(run, record, log), record.row if record else None
    tables = results_tables.zero_shot_table, results_tables.probe_table, results_tables.retrieval_table
    evaluated = len(log.evaluations) > 1
    page = render.markdown_page(
        "run_page.md.j2",
        title=run.name,
        facts=_facts(run, record),
        row=row,
        published=result_tables(metrics, missing, row),
        results=[table(metrics) for table in tables],
        missing=missing,
        not_converged=record.not_converged if record else (),
        cost=results_tables.cost_table(record.training if record else {}),
        curves=log.training and _save(run, "training", figures.training_curves(log.training)),
        evaluation_curves=evaluated and _save(run, "evaluations", figures.evaluation_curves(log.evaluations)),
        zero_shot=list(_zero_shot(run, metrics)),
        retrieval=list(_retrieval(run, metrics)),
        samples=list(_samples(run)),
        record=record,
    )
    write_whole(run / "report.md", page)
    return run / "report.md"


def _metrics(run: Path, record: RunRecord | None, log: TrainingLog) -> Metrics:
    """Metrics of the record; of an unfinished run, those of its newest evaluation."""
    if record and record.metrics:
        return record.metrics
    newest = _json(run / "evaluation" / "metrics.json") or (log.evaluations[-1] if log.evaluations else {})
    return parsed({name: value for name, value in newest.items() if isinstance(value, int | float)})


def _facts(run: Path, record: RunRecord | None) -> dict[str, object]:
    """Name and value of the facts at the top; None for an absent one."""
    config = config_of(run) if (run / "config.yaml").exists() else {}
    names = {part: _class_name(config.get(part)) for part in ("encoder", "head", "objective")}
    towers = [_class_name(config.get("encoder", {}).get(tower)) for tower in ("image_tower", "text_tower")]
    if all(towers):
        names["encoder"] = f"{towers[0]}, {towers[1]}"
    trainer, record = config.get("trainer", {}), record or RunRecord(seed=config.get("seed"))
    return {
        "Experiment": record.experiment,
        "Paper row": record.row,
        **{part.capitalize(): markdown_code(name) for part, name in names.items() if name},
        "Global batch size": trainer.get("global_batch"),
        "Epochs": trainer.get("epochs"),
        "Precision": trainer.get("precision"),
        "Seed": record.seed,
    }


def _zero_shot(run: Path, metrics: Metrics) -> Iterator[dict[str, object]]:
    """Errors on each dataset, for the template."""
    from clipzoo.report.run_page import figures

    for path in sorted((run / "evaluation" / "zero_shot").glob("*.npz")):
        name, content = path.stem, arrays.load(path)
        yield {
            "name": name,
            "top1": metrics.get(MetricKey("zero_shot", name, "", "top1")),
            "confusions": arrays.confusions(content),
            "matrix": _save(run, f"confusion_{name}", figures.confusion_matrix(content)),
            "mistakes": len(content["images"]) and _save(run, f"mistakes_{name}", figures.mistakes(content)),
        }


def _retrieval(run: Path, metrics: Metrics) -> Iterator[dict[str, object]]:
    """Retrieved images of each dataset, for the template."""
    from clipzoo.report.run_page import figures

    for path in sorted((run / "evaluation" / "retrieval").glob("*.npz")):
        name, content = path.stem, arrays.load(path)
        yield {
            "name": name,
            "recall": metrics.get(MetricKey("retrieval", name, "text_to_image", "recall_at_1")),
            "gallery": int(content["gallery"]),
            "figure": _save(run, f"retrieval_{name}", figures.retrieved(content)),
        }


def _samples(run: Path) -> Iterator[tuple[str, str]]:
    """Name and figure of the histograms of per-sample statistics, then of the extreme samples of each statistic."""
    from clipzoo.report.run_page.sample_figures import extreme_samples, sample_histograms

    summary, folder = _json(run / "evaluation" / "samples.json"), run / "evaluation" / "samples"
    if summary:
        yield "histograms", _save(run, "samples", sample_histograms(summary))
    for name in summary if (folder / "captions.json").exists() else ():
        yield name, _save(run, f"samples_{name}", extreme_samples(summary[name], folder))


def _save(run: Path, name: str, figure: Figure) -> str:
    """Save a figure and return its path relative to the page; characters that are not of a file name become "_"."""
    name = re.sub(r"[^\w.-]", "_", name)
    figure.savefig(run / "report" / f"{name}.png", dpi=130)
    return f"report/{name}.png"


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _class_name(part: object) -> str | None:
    """Name of the class of a `_target_` node."""
    return part["_target_"].rsplit(".", 1)[-1] if isinstance(part, dict) and "_target_" in part else None
