"""The page of one run: report.md with its figures in report/, and report.html with the figures in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipzoo import io
from clipzoo.data.captions import CaptionCounts, described
from clipzoo.io.text import save_figure
from clipzoo.report import render
from clipzoo.report.paper_tables.published import Metrics
from clipzoo.report.run_page import arrays, results_tables
from clipzoo.report.run_page.curves import loss_unit, value_log
from clipzoo.report.run_page.published_results import result_tables
from clipzoo.runs.arrays import read_arrays
from clipzoo.runs.directory import CAPTIONS, config_of, is_finished
from clipzoo.runs.metric_key import VALIDATION_LOSS, MetricKey, parsed, split
from clipzoo.runs.names import departs
from clipzoo.runs.record import ENDED_EARLY, RunRecord
from clipzoo.runs.training_log import TrainingLog

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from clipzoo.report.run_page.sample_figures import Statistic


def write_report(run: Path, record: RunRecord | None = None) -> Path:
    """Write the page of a run directory from its config.yaml, metrics.jsonl, results.json and evaluation/.

    record: results that are not written yet; None for those of results.json. Sections without content are left out;
    damaged files are named on the page. Returns the path of report.md.
    """
    # matplotlib takes half a second to import.
    from clipzoo.report.run_page import figures
    from clipzoo.report.run_page.profile_page import write_profile

    io.require_no_links(run)
    damage = io.DamageLog()
    if record is None and is_finished(run):
        record = damage.read(partial(RunRecord.read, run), None)
    log = damage.read(partial(TrainingLog.read, run), TrainingLog((), ()))
    config: dict[str, Any] = {}
    if (run / "config.yaml").exists():
        config = damage.read(partial(config_of, run), config)
    missing = {name: str(reason) for name, reason in _json(run / "evaluation" / "missing.json", damage).items()}
    metrics, row = _metrics(run, record, log, damage), record.row if record else None
    tables = results_tables.zero_shot_table, results_tables.probe_table, results_tables.retrieval_table
    evaluated = len(log.evaluations) > 1
    return render.write_document(
        run / "report.md",
        "run_page.j2",
        run.name,
        facts=_facts(config, record) | _caption_fact(run, damage) | _validation_fact(metrics),
        row=row,
        published=result_tables(metrics, missing, row),
        results=[table(metrics) for table in tables],
        average=[table(split(metrics)[1]) for table in tables],
        missing=missing,
        not_converged=record.not_converged if record else (),
        cost=results_tables.cost_table(
            {name: cost for name, cost in record.training.items() if name != ENDED_EARLY} if record else {}
        ),
        curves=log.training
        and _save(
            run,
            "training",
            figures.training_curves(log.training, loss_unit(config), log.evaluations, value_log(config)),
        ),
        evaluation_curves=evaluated and _save(run, "evaluations", figures.evaluation_curves(log.evaluations)),
        profile=damage.read(partial(write_profile, run), None),
        spikes=results_tables.spike_table(_spikes(run, damage)),
        zero_shot=list(_zero_shot(run, metrics, damage)),
        retrieval=list(_retrieval(run, metrics, damage)),
        samples=list(_samples(run, damage)),
        damaged=[f"{fault.path.relative_to(run)} {fault.fault}" for fault in damage.faults],
        record=record,
    )


def _metrics(run: Path, record: RunRecord | None, log: TrainingLog, damage: io.DamageLog) -> Metrics:
    """Metrics of the record; of an unfinished run, those of its newest evaluation."""
    if record and record.metrics:
        return record.metrics
    newest = _json(run / "evaluation" / "metrics.json", damage) or (log.evaluations[-1] if log.evaluations else {})
    return parsed({name: value for name, value in newest.items() if isinstance(value, int | float)})


def _facts(config: Mapping[str, Any], record: RunRecord | None) -> dict[str, object]:
    """Name and value of the facts at the top, without those that are unknown."""
    names = {part: _class_name(config.get(part)) for part in ("encoder", "head", "objective")}
    towers = [_class_name(config.get("encoder", {}).get(tower)) for tower in ("image_tower", "text_tower")]
    if all(towers):
        names["encoder"] = f"{towers[0]}, {towers[1]}"
    trainer, record = config.get("trainer", {}), record or RunRecord(seed=config.get("seed"))
    facts = {
        "Experiment": None if departs(record.overrides) else record.experiment,
        "Paper row": record.row,
        **{part.capitalize(): name for part, name in names.items()},
        "Global batch size": trainer.get("global_batch"),
        "Epochs": trainer.get("epochs"),
        "Ended early": record.training.get(ENDED_EARLY),
        "Precision": trainer.get("precision"),
        "Seed": record.seed,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _caption_fact(run: Path, damage: io.DamageLog) -> dict[str, object]:
    """How often captions repeat in the dataset; empty for runs without captions."""
    path = run / CAPTIONS

    def read() -> dict[str, object]:
        figures = io.read_json(path, io.MB)
        io.require_fields(path, figures, dict.fromkeys(CaptionCounts().figures(0), (int, float)))
        return {"Captions": described(figures)}

    return damage.read(read, {}) if path.exists() else {}


def _validation_fact(metrics: Metrics) -> dict[str, object]:
    return {"Validation loss": f"{metrics[VALIDATION_LOSS]:.4f}"} if VALIDATION_LOSS in metrics else {}


def _spikes(run: Path, damage: io.DamageLog) -> Iterator[dict[str, Any]]:
    """Content of spikes/step_N.json, in order of the steps."""
    for path in sorted((run / "spikes").glob("step_*.json")):
        spike = _json(path, damage)
        if damage.read(partial(results_tables.is_spike, path, spike), False):
            yield {**spike, "path": str(path.relative_to(run))}


def _zero_shot(run: Path, metrics: Metrics, damage: io.DamageLog) -> Iterator[dict[str, object]]:
    """Errors on each dataset, for the template."""
    from clipzoo.report.run_page import figures

    for path in sorted((run / "evaluation" / "zero_shot").glob("*.npz")):
        name, content = path.stem, damage.read(partial(read_arrays, path, arrays.ZERO_SHOT), None)
        if content is None:
            continue
        yield {
            "name": name,
            "top1": metrics.get(MetricKey("zero_shot", name, "", "top1")),
            "confusions": arrays.confusions(content),
            **_classes(run, name, content),
            "mistakes": len(content["images"]) and _save(run, f"mistakes_{name}", figures.mistakes(content)),
        }


def _classes(run: Path, name: str, content: arrays.Arrays) -> dict[str, object]:
    """The confusion matrix, or for more classes than a picture can show, a table of the worst ones."""
    from clipzoo.report.run_page import figures

    if len(content["class_names"]) > arrays.MOST_IN_MATRIX:
        return {"matrix": None, "worst": arrays.worst_classes(content)}
    return {"matrix": _save(run, f"confusion_{name}", figures.confusion_matrix(content)), "worst": None}


def _retrieval(run: Path, metrics: Metrics, damage: io.DamageLog) -> Iterator[dict[str, object]]:
    """Retrieved images of each dataset, for the template."""
    from clipzoo.report.run_page import figures

    for path in sorted((run / "evaluation" / "retrieval").glob("*.npz")):
        name, content = path.stem, damage.read(partial(read_arrays, path, arrays.RETRIEVAL), None)
        if content is None:
            continue
        yield {
            "name": name,
            "recall": metrics.get(MetricKey("retrieval", name, "text_to_image", "recall_at_1")),
            "gallery": int(content["gallery"]),
            "figure": _save(run, f"retrieval_{name}", figures.retrieved(content)),
        }


def _samples(run: Path, damage: io.DamageLog) -> Iterator[tuple[str, str]]:
    """Name and figure of the histograms of per-sample statistics, then of the extreme samples of each statistic."""
    from clipzoo.report.run_page.sample_figures import extreme_samples, read_statistics, sample_histograms

    path, folder = run / "evaluation" / "samples.json", run / "evaluation" / "samples"
    summary: dict[str, Statistic] = {}
    if path.exists():
        summary = damage.read(partial(read_statistics, path), summary)
    if summary:
        yield "histograms", _save(run, "samples", sample_histograms(summary))
    for name in summary if (folder / "captions.json").exists() else ():
        figure = damage.read(partial(extreme_samples, summary[name], folder), None)
        if figure is not None:
            yield name, _save(run, f"samples_{name}", figure)


def _save(run: Path, name: str, figure: Figure) -> str:
    """Save a figure and return its path relative to the page; characters that are not of a file name become "_"."""
    name = re.sub(r"[^\w.-]", "_", name)
    save_figure(figure, io.below(run, f"report/{name}.png"), dpi=130)
    return f"report/{name}.png"


def _json(path: Path, damage: io.DamageLog) -> dict[str, Any]:
    """Content of a JSON file; empty without one, or if it is damaged."""
    return damage.read(partial(io.read_json, path, io.MB), {}) if path.exists() else {}


def _class_name(part: object) -> str | None:
    """Name of the class of a `_target_` node."""
    return part["_target_"].rsplit(".", 1)[-1] if isinstance(part, dict) and "_target_" in part else None
