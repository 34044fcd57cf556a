"""The page of one run: `report.md` with its pictures under `report/`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clipzoo.io import write_whole
from clipzoo.report.run_page.evaluation import evaluation_section
from clipzoo.report.run_page.results_tables import cost_table, probe_table, retrieval_table, zero_shot_table
from clipzoo.report.run_page.samples import sample_pages
from clipzoo.runs.directory import config_of


def write_report(run: Path) -> Path:
    """From config.yaml, metrics.jsonl, results.json and evaluation/ of a run's folder; what is missing is left out."""
    # matplotlib costs half a second, and drawing is the last thing a run does.
    from clipzoo.report.run_page import figures

    pictures = run / "report"
    pictures.mkdir(parents=True, exist_ok=True)
    lines, evaluations = read_metrics(run / "metrics.jsonl")
    results = json.loads((run / "results.json").read_text()) if (run / "results.json").exists() else {}
    metrics = results.get("metrics") or _evaluated(run) or (evaluations[-1] if evaluations else {})
    missing = _missing_sets(run)
    parts = [f"# {run.name}", _facts(run, results), evaluation_section(metrics, missing, results.get("row"))]
    parts += [table(metrics) for table in (zero_shot_table, probe_table, retrieval_table)]
    parts.append(_missing(missing))
    if lines:
        figures.training_curves(lines).savefig(pictures / "training.png")
        parts.append(f"## Training\n\n{cost_table(results.get('training', {}))}\n\n![curves](report/training.png)")
    if len(evaluations) > 1:
        figures.evaluation_curves(evaluations).savefig(pictures / "evaluations.png")
        parts.append("![evaluations during training](report/evaluations.png)")
    parts += [*_zero_shot_pages(run, pictures, metrics), *_retrieval_pages(run, pictures, metrics)]
    parts += sample_pages(run, pictures)
    parts.append(_how(results))
    path = run / "report.md"
    write_whole(path, "\n\n".join(part for part in parts if part) + "\n")
    return path


def _evaluated(run: Path) -> dict[str, Any]:
    """What scripts/evaluate.py found in a run that is not finished."""
    path = run / "evaluation" / "metrics.json"
    return json.loads(path.read_text()) if path.exists() else {}


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of training, and the evaluations, of a metrics.jsonl; a line that a kill cut short is left out."""
    training, evaluations = [], []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if line.get("event") == "evaluation":
            evaluations.append(line)
        elif "event" not in line:
            training.append(line)
    return training, evaluations


def _facts(run: Path, results: dict[str, Any]) -> str:
    config = config_of(run) if (run / "config.yaml").exists() else {}
    names = {part: _class(config.get(part)) for part in ("encoder", "head", "objective")}
    towers = [_class(config.get("encoder", {}).get(each)) for each in ("image_tower", "text_tower")]
    if all(towers):
        names["encoder"] = f"{towers[0]}, {towers[1]}"
    trainer = config.get("trainer", {})
    facts = {
        "Experiment": results.get("experiment"),
        "Paper row": results.get("row"),
        **{part.capitalize(): f"`{name}`" for part, name in names.items() if name},
        "Global batch": trainer.get("global_batch"),
        "Epochs": trainer.get("epochs"),
        "Precision": trainer.get("precision"),
        "Seed": results.get("seed", config.get("seed")),
    }
    return "\n".join(f"- {name}: {value}" for name, value in facts.items() if value is not None)


def _class(part: Any) -> str | None:
    """The name of a part's class."""
    return part["_target_"].rsplit(".", 1)[-1] if isinstance(part, dict) and "_target_" in part else None


def _missing_sets(run: Path) -> dict[str, str]:
    """The sets that were asked for and not found, with the way to get each."""
    path = run / "evaluation" / "missing.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _missing(found: dict[str, str]) -> str:
    if not found:
        return ""
    return "## Sets that were not there\n\n" + "\n".join(f"- **{name}**: `{text}`" for name, text in found.items())


def _zero_shot_pages(run: Path, pictures: Path, metrics: dict[str, Any]) -> Iterator[str]:
    from clipzoo.report.run_page import figures
    from clipzoo.report.run_page.examples import confusions, load

    paths = sorted((run / "evaluation" / "zero_shot").glob("*.npz"))
    if paths:
        yield "## Where zero-shot goes wrong"
    for path in paths:
        name, found = path.stem, load(path)
        figures.confusion_matrix(found).savefig(pictures / f"confusion_{name}.png")
        lines = [f"### {name}", _score(metrics, f"zero_shot/{name}/top1", "Top-1"), confusions(found)]
        lines.append(f"![confusion matrix of {name}](report/confusion_{name}.png)")
        if len(found["images"]):
            figures.mistakes(found).savefig(pictures / f"mistakes_{name}.png")
            lines.append("The mistakes that the model was surest of, in red what it took the picture for:")
            lines.append(f"![mistakes on {name}](report/mistakes_{name}.png)")
        yield "\n\n".join(line for line in lines if line)


def _retrieval_pages(run: Path, pictures: Path, metrics: dict[str, Any]) -> Iterator[str]:
    from clipzoo.report.run_page import figures
    from clipzoo.report.run_page.examples import load

    for path in sorted((run / "evaluation" / "retrieval").glob("*.npz")):
        name, found = path.stem, load(path)
        figures.retrieved(found).savefig(pictures / f"retrieval_{name}.png")
        text = (
            f"The pictures that captions find among {int(found['gallery']):,}, best first; the caption's own is framed."
        )
        score = _score(metrics, f"retrieval/{name}/text_to_image/recall_at_1", "Text to image, recall@1")
        yield f"## Retrieval: {name}\n\n{score}\n\n{text}\n\n![retrieved pictures](report/retrieval_{name}.png)"


def _score(metrics: dict[str, Any], key: str, name: str) -> str:
    return f"{name}: **{metrics[key]:.1f} %**" if key in metrics else ""


def _how(results: dict[str, Any]) -> str:
    if not results:
        return ""
    versions = ", ".join(f"{name} {value}" for name, value in (results.get("versions") or {}).items())
    overrides = " ".join(results.get("overrides") or [])
    # What was only evaluated has no steps of training.
    program = "train.py" if results.get("training", {}).get("steps") != 0 else "scripts/evaluate.py"
    lines = ["## How it was made", f"```\npython {program} {overrides}\n```" if overrides else ""]
    lines.append(f"Revision `{results.get('revision')}`; {versions}.")
    return "\n\n".join(line for line in lines if line)
