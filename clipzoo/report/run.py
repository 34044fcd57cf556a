"""The page of one run: `report.md` with its pictures under `report/`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from clipzoo.report.results_tables import cost_table, probe_table, retrieval_table, zero_shot_table
from clipzoo.report.samples import sample_pages
from clipzoo.run import write_whole


def write_report(run: Path) -> Path:
    """From config.yaml, metrics.jsonl, results.json and evaluation/ of a run's folder; what is missing is left out."""
    # matplotlib costs half a second, and drawing is the last thing a run does.
    from clipzoo.report import figures

    pictures = run / "report"
    pictures.mkdir(parents=True, exist_ok=True)
    lines, evaluations = read_metrics(run / "metrics.jsonl")
    results = json.loads((run / "results.json").read_text()) if (run / "results.json").exists() else {}
    metrics = results.get("metrics") or (evaluations[-1] if evaluations else {})
    parts = [f"# {run.name}", _facts(run, results)]
    parts += [table(metrics) for table in (zero_shot_table, probe_table, retrieval_table)]
    parts.append(_missing(run))
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
    config = yaml.safe_load((run / "config.yaml").read_text()) if (run / "config.yaml").exists() else {}
    names = {
        part: config[part]["_target_"].rsplit(".", 1)[-1]
        for part in ("encoder", "head", "objective")
        if isinstance(config.get(part), dict) and "_target_" in config[part]
    }
    facts = {
        "Experiment": results.get("experiment"),
        "Paper row": results.get("row"),
        **{part.capitalize(): f"`{name}`" for part, name in names.items()},
        "Global batch": config.get("trainer", {}).get("global_batch"),
        "Seed": results.get("seed", config.get("seed")),
    }
    return "\n".join(f"- {name}: {value}" for name, value in facts.items() if value is not None)


def _missing(run: Path) -> str:
    """The sets that were asked for and not found."""
    path = run / "evaluation" / "missing.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    if not found:
        return ""
    return "## Sets that were not there\n\n" + "\n".join(f"- **{name}**: `{text}`" for name, text in found.items())


def _zero_shot_pages(run: Path, pictures: Path, metrics: dict[str, Any]) -> Iterator[str]:
    from clipzoo.report import figures
    from clipzoo.report.examples import confusions, load

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
    from clipzoo.report import figures
    from clipzoo.report.examples import load

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
    lines = ["## How it was made", f"```\npython train.py {overrides}\n```" if overrides else ""]
    lines.append(f"Revision `{results.get('revision')}`; {versions}.")
    return "\n\n".join(line for line in lines if line)
