"""The model card of a run: README.md with the data, the recipe, the results and the papers of a trained model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml

from clipzoo.api.formats.card_results import measured, results
from clipzoo.api.formats.citations import citations
from clipzoo.api.loading import LoadedModel
from clipzoo.errors import masked
from clipzoo.io.text import markdown_code, markdown_text
from clipzoo.runs.metric_key import split
from clipzoo.runs.record import FILE, RunRecord

RECIPE = {
    "head": ("head", "_target_"), "objective": ("objective", "_target_"), "optimizer": ("optim", "_target_"),
    "global batch": ("trainer", "global_batch"), "epochs": ("trainer", "epochs"), "steps": ("trainer", "steps"),
    "precision": ("trainer", "precision"), "seed": ("seed",),
}  # fmt: skip
"""Row of the recipe -> keys of the configuration."""


def model_card(model: LoadedModel, licence: str | None, data_licence: str | None) -> str:
    """Return the card of a model as Markdown; sections without a record, as of an open_clip model, are left out."""
    folder, config = model.folder, model.config
    record = RunRecord.read(folder) if folder is not None and (folder / FILE).exists() else None
    if record is not None:
        record = replace(record, metrics=split(record.metrics)[model.averaged])
    name = folder.name if folder is not None else type(model.head).__name__
    head, objective = (config.get(part, {}).get("_target_", "") for part in ("head", "objective"))
    short = [target.rpartition(".")[2] for target in (head, objective) if target]
    parts = [
        _front_matter(name, licence, short, record),
        f"# {markdown_text(name)}",
        f"Image-text model trained by clipzoo: {' and '.join(map(markdown_code, short))}.",
        _use(model),
        _training(config, record),
        results(folder, record),
        _limits(),
        _licences(licence, data_licence),
        _papers(head, objective),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(name: str, licence: str | None, tags: list[str], record: RunRecord | None) -> str:
    facts: dict[str, Any] = {"library_name": "clipzoo", "pipeline_tag": "zero-shot-image-classification"}
    facts["tags"] = ["clipzoo", "contrastive-learning", *(tag.lower() for tag in tags)]
    if licence is not None:
        facts["license"] = licence
    by_place: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for key, value in measured(record):
        number = {"type": key.metric, "name": str(key), "value": round(value, 2)}
        by_place.setdefault((key.task, key.dataset), []).append(number)
    index = [
        {"task": {"type": task}, "dataset": {"type": dataset, "name": dataset}, "metrics": metrics}
        for (task, dataset), metrics in by_place.items()
    ]
    if index:
        facts["model-index"] = [{"name": name, "results": index}]
    return f"---\n{yaml.safe_dump(facts, sort_keys=False, allow_unicode=True)}---"


def _use(model: LoadedModel) -> str:
    context = model.config["encoder"].get("context_length", "any number of")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"""## Use

```python
import clipzoo
from PIL import Image

model = clipzoo.load("FOLDER")  # this directory, or "hf-hub:USER/NAME"
image = model.encode_image(model.transform(Image.open("picture.jpg"))[None])
text = model.encode_text(model.tokenizer(["a red circle", "a blue square"]))
print(model.similarity(image, text).softmax(dim=1))
```

Images of {model.encoder.image_size} pixels, captions of up to {context} tokens, {parameters:,} parameters."""


def _training(config: Mapping[str, Any], record: RunRecord | None) -> str:
    if "trainer" not in config:
        return ""
    rows = [("data", markdown_code(str(masked(config["data"].get("shards", "not stated"))), in_table=True))]
    for name, keys in RECIPE.items():
        value: Any = config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            rows.append(
                (name, markdown_code(str(value).rpartition(".")[2] if "_target_" in keys else str(value), True))
            )
    lines = [
        "## Training",
        "",
        "| setting | value |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in rows),
    ]
    if record is not None:
        lines += ["", "Command:", "", *(f"    {line}" for line in record.command.splitlines())]
        cost = record.training
        facts = [f"revision {record.revision}"] if record.revision else []
        facts += [f"{name} {version}" for name, version in record.versions.items() if version]
        if "steps" in cost:
            facts.insert(0, f"{cost['steps']} steps")
        lines += ["", markdown_text(", ".join(facts)) + "."] if facts else []
    return "\n".join(map(str, lines))


def _limits() -> str:
    return """## Limits

The model knows what its training data show and say, with their errors and biases, in the language of their captions.
Scores are comparable among the captions of one image and the images of one caption; they are not probabilities. It has
not been tested for any use that affects people, and must not be used to identify or to judge them."""


def _licences(licence: str | None, data_licence: str | None) -> str:
    return f"""## Licence

| of | licence |
| --- | --- |
| model | {markdown_text(licence or "not stated")} |
| training data | {markdown_text(data_licence or "not stated")} |"""


def _papers(*targets: str) -> str:
    papers = citations(*targets)
    return f"## Citation\n\n```bibtex\n{papers}\n```" if papers else ""
