"""`clipzoo.export` and `clipzoo.load`: trained models in formats of other libraries, and of the Hugging Face hub."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml

from clipzoo import io, loading
from clipzoo.build import parameters_of, part_class, with_pretrained
from clipzoo.encoders.huggingface import HuggingFaceTokenizer, stored_folder
from clipzoo.errors import ConfigError, installation, masked, nearest
from clipzoo.exports import graphs, open_clip, transformers
from clipzoo.exports.files import save_weights, tokenizer_faults, write_preprocessing
from clipzoo.io.text import markdown_code, markdown_text
from clipzoo.io.weights import from_hub
from clipzoo.loading import CONFIG, HUB, PAIR, TOKENIZER_IN_FOLDER, VERSION, WEIGHTS, LoadedModel, value_faults
from clipzoo.runs.identity import flat, uses_variables
from clipzoo.runs.record import DEVIATION, FILE, VALIDATION, MetricKey, RunRecord, read_arrays, split
from clipzoo.runs.remote import local_copy

PICTURE = "retrieval.png"
TITLES = {"zero_shot": "Zero-shot classification", "linear_probe": "Linear probe", "retrieval": "Retrieval"}
RECIPE = {
    "head": "head._target_", "objective": "objective._target_", "optimizer": "optim._target_",
    "global batch": "trainer.global_batch", "epochs": "trainer.epochs", "steps": "trainer.steps",
    "precision": "trainer.precision", "seed": "seed",
}  # fmt: skip
"""Row of the recipe -> key of the configuration."""
USE = """## Use

```python
import clipzoo
from PIL import Image

model = clipzoo.load("FOLDER")  # this directory, or "hf-hub:USER/NAME"
image = model.encode_image(model.transform(Image.open("picture.jpg"))[None])
text = model.encode_text(model.tokenizer(["a red circle", "a blue square"]))
print(model.similarity(image, text).softmax(dim=1))
```
"""
LIMITS = """## Limits

The model knows what its training data show and say, with their errors and biases, in the language of their captions.
Scores are comparable among the captions of one image and the images of one caption; they are not probabilities. It has
not been tested for any use that affects people, and must not be used to identify or to judge them."""


def export(
    model: LoadedModel,
    folder: str | Path,
    to: str = "open_clip",
    licence: str | None = None,
    data_licence: str | None = None,
) -> None:
    """Write a model to a folder in the format `to`.

    open_clip: for `open_clip.create_model("local-dir:FOLDER")`. transformers: for `CLIPModel.from_pretrained`, with
    processor and tokenizer. torch, onnx: programs of torch.export and graphs for onnxruntime, which hold every head as
    three graphs, see `clipzoo.exports.graphs`. hub: a directory with a model card for `clipzoo.load`, here or on the
    Hugging Face hub; `licence` and `data_licence` are those of the model and of its training data, for the card.

    Raises ConfigError if the format cannot represent the model, or the folder has files. Nothing is written then.
    """
    if to not in FORMATS:
        raise ConfigError(f"to={to} is not a format ({', '.join(FORMATS)}){nearest(to, list(FORMATS))}")
    form, folder = FORMATS[to], Path(folder)
    if reasons := form.faults(model):
        raise ConfigError(f"{to} cannot represent this model: {'; '.join(reasons)}")
    if missing := [name for name in form.packages if find_spec(name) is None]:
        raise ConfigError(f"{to} needs {', '.join(missing)}: {installation(form.extra)}")
    if io.below(folder, form.mark).exists():
        raise ConfigError(f"{folder} already contains an exported model: choose another folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} has files already: choose an empty folder, or one that does not exist")
    with io.new_folder(folder) as new:
        if to == "hub":
            write_hub(model, new, licence, data_licence)
            return
        if to in ("torch", "onnx") and not tokenizer_faults(model):
            write_preprocessing(model, new)
        form.write(model, new)


def load(
    path: str | Path, device: str | torch.device = "cpu", trust: str | Sequence[str] = (), average: bool = False
) -> LoadedModel:
    """Load a trained model.

    path: a run directory (its newest valid checkpoint), one checkpoint of a run, or the URL of one of these in a store
        ("s3://bucket/runs/demo", as text); a directory of clipzoo (`clipzoo.export(..., to="hub")`), open_clip or
        transformers; "hf-hub:OWNER/MODEL", such a directory on the Hugging Face hub; "open_clip:NAME/TAG"; or
        "transformers:OWNER/MODEL". "@REVISION" may follow OWNER/MODEL.
    average: load the averaged weights of a run that was trained with `average=...`.

    The configuration may name parts of this package, and classes of the packages in `trust`: "mypackage".
    trust="oc.env" resolves its environment variables, ${oc.env:NAME}. Raises ConfigError if there is no such model,
    its configuration names code or an untrusted class, or it has no average.
    """
    name, trust = str(path), (trust,) if isinstance(trust, str) else trust
    library, _, place = name.partition(":")
    on_hub = name.startswith(HUB)
    if library == "transformers":
        model = transformers.from_transformers(place)
    elif library in ("open_clip", "local-dir"):
        place = name.removeprefix("open_clip:")
        if not {":", "/"} & {*place}:
            raise ConfigError(f"{name} names no weights: give open_clip:NAME/TAG or open_clip:local-dir:FOLDER")
        model = open_clip.from_open_clip(place)
    else:
        folder = Path(place) if on_hub else local_copy(name, "path")
        if on_hub:
            with from_hub(place, f"{name} cannot be downloaded"):
                folder = stored_folder(place, [FORMATS[kind].mark for kind in READABLE])
                if (folder / CONFIG).exists():
                    folder = stored_folder(place, ["*.json", "*.safetensors"])
        kind = next((kind for kind in READABLE if io.below(folder, FORMATS[kind].mark, links=True).exists()), None)
        if kind is None or (folder / "config.yaml").exists():
            model = loading.load_run(folder, trust, average)
        elif kind == "hub":
            model = loading.load_published(folder, trust)
        elif kind == "open_clip":
            model = open_clip.from_open_clip(name if on_hub else f"local-dir:{folder}")
        else:
            model = transformers.from_transformers(place if on_hub else folder)
    if average and not model.averaged:
        raise ConfigError(f"{name} holds one model and no average: export that of a run")
    return model.to(device).eval()


def faults(model: LoadedModel) -> list[str]:
    """Return the reasons why other users could not load the model."""
    if uses_variables({"encoder": model.config["encoder"], "head": model.config["head"]}):
        return ["its encoder or head refers to environment variables"]
    return list(value_faults(_nodes(model)))


def write_hub(model: LoadedModel, folder: Path, licence: str | None = None, data_licence: str | None = None) -> None:
    """Write the directory, which `clipzoo.load(folder)` reads; clipzoo.json is written last."""
    save_weights(model.state_dict(), folder / WEIGHTS)
    if not tokenizer_faults(model):
        write_preprocessing(model, folder)
    if (picture := _retrieval_picture(model.folder)) is not None:
        with io.whole(folder / PICTURE) as file:
            file.write(io.read_bytes(picture, 64 * io.MB))
    io.write_whole(folder / "README.md", model_card(model, licence, data_licence))
    content = {"version": VERSION, **_nodes(model), "interpolation": model.transform.interpolation}
    if model.transform.resize_mode != "shortest":
        content["resize_mode"] = model.transform.resize_mode
    if PAIR in model.config:
        content[PAIR] = model.config[PAIR]
    io.write_json(folder / CONFIG, content)


def _nodes(model: LoadedModel) -> dict[str, Any]:
    """Return the nodes of encoder and head for the directory, without sources of pretrained weights."""
    nodes = with_pretrained(
        {part: model.config[part] for part in ("encoder", "head")},
        lambda source: False if isinstance(source, bool) else None,
    )
    if isinstance(model.tokenizer, HuggingFaceTokenizer) and not tokenizer_faults(model):
        nodes["encoder"]["tokenizer"] = {**nodes["encoder"]["tokenizer"], "name": TOKENIZER_IN_FOLDER}
    return nodes


def upload(folder: Path, repository: str) -> str:
    """Upload a directory to the hub's USER/NAME and return its address. Raises ConfigError if the hub refuses it."""
    from huggingface_hub import HfApi

    require_token()
    try:
        hub = HfApi()
        address = str(hub.create_repo(repository, exist_ok=True))
        hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload by clipzoo")
    # A refused name, token or connection raises errors of many types.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        remedy = f"Upload the directory with: hf upload {repository} {folder}"
        raise ConfigError(f"{HUB}{repository}: the upload failed: {reason}. {remedy}") from error
    return address


def require_token() -> None:
    """Raise ConfigError unless the hub's client has a token."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise ConfigError("an upload needs a token of the Hugging Face hub: set HF_TOKEN, or run hf auth login")


def model_card(model: LoadedModel, licence: str | None, data_licence: str | None) -> str:
    """Return the card of a model as Markdown; models without a run, such as open_clip's, lack some sections."""
    folder, config = model.folder, model.config
    record = RunRecord.read(folder) if folder is not None and (folder / FILE).exists() else None
    if record is not None:
        record = replace(record, metrics=split(record.metrics)[model.averaged])
    name = folder.name if folder is not None else type(model.head).__name__
    targets = [config.get(part, {}).get("_target_", "") for part in ("head", "objective")]
    class_names = [target.rpartition(".")[2] for target in targets if target]

    # The hub reads metadata from YAML before the text.
    facts: dict[str, Any] = {"library_name": "clipzoo", "pipeline_tag": "zero-shot-image-classification"}
    facts["tags"] = ["clipzoo", "contrastive-learning", *(part.lower() for part in class_names)]
    if licence is not None:
        facts["license"] = licence
    by_place: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for key, value in measured(record).items():
        number = {"type": key.metric, "name": str(key), "value": round(value, 2)}
        by_place.setdefault((key.task, key.dataset), []).append(number)
    if by_place:
        index = [
            {"task": {"type": task}, "dataset": {"type": dataset, "name": dataset}, "metrics": metrics}
            for (task, dataset), metrics in by_place.items()
        ]
        facts["model-index"] = [{"name": name, "results": index}]

    context = config["encoder"].get("context_length", "any number of")
    sections = [
        f"---\n{yaml.safe_dump(facts, sort_keys=False, allow_unicode=True)}---",
        f"# {markdown_text(name)}",
        f"Image-text model trained by clipzoo: {' and '.join(map(markdown_code, class_names))}.",
        f"{USE}\nImages of {model.encoder.image_size} pixels, captions of up to {context} tokens, "
        f"{parameters_of(model):,} parameters.",
    ]
    if "trainer" in config:
        data = markdown_code(str(masked(config["data"].get("shards", "not stated"))), in_table=True)
        settings = flat(config)
        lines = ["## Training", "", "| setting | value |", "| --- | --- |", f"| data | {data} |"]
        for label, setting in RECIPE.items():
            if (chosen := settings.get(setting)) is not None:
                text = str(chosen).rpartition(".")[2] if setting.endswith("_target_") else str(chosen)
                lines.append(f"| {label} | {markdown_code(text, in_table=True)} |")
        if record is not None:
            lines += ["", "Command:", "", *(f"    {line}" for line in record.command.splitlines())]
            costs = [f"{record.training['steps']} steps"] if "steps" in record.training else []
            costs += [f"revision {record.revision}"] if record.revision else []
            costs += [f"{package} {version}" for package, version in record.versions.items() if version]
            lines += ["", markdown_text(", ".join(costs)) + "."] if costs else []
        sections.append("\n".join(lines))
    sections += [
        results(folder, record),
        LIMITS,
        "## Licence\n\n| of | licence |\n| --- | --- |\n"
        f"| model | {markdown_text(licence or 'not stated')} |\n"
        f"| training data | {markdown_text(data_licence or 'not stated')} |",
    ]
    # An objective of another package is not imported, and so not cited.
    papers = dict.fromkeys(model.head.citations)
    with suppress(ConfigError, AttributeError):
        papers |= dict.fromkeys(part_class(targets[1]).citations)
    if papers:
        entries = "\n\n".join(paper.bibtex for paper in papers)
        sections.append(f"## Citation\n\n```bibtex\n{entries}\n```")
    return "\n\n".join(sections) + "\n"


def results(folder: Path | None, record: RunRecord | None) -> str:
    """Return the section of the results: a table for each task, with intervals and protocol. folder: of the run."""
    metrics = measured(record)
    if folder is None or record is None or not metrics:
        return "## Results\n\nThis model has not been evaluated."
    lines = ["## Results", "", "Percent. In brackets: 95% intervals for the number of test samples (Wilson)."]
    for task in dict.fromkeys(key.task for key in metrics):
        values = {key: value for key, value in metrics.items() if key.task == task}
        lines += ["", f"### {TITLES.get(task, markdown_text(_words(task)))}", "", *_table(folder, values, task), ""]
        # One line with the protocol of all datasets, or one for each protocol with its datasets.
        protocols: dict[str, list[str]] = {}
        for dataset in dict.fromkeys(key.dataset for key in values):
            settings = record.protocol.get(f"{task}/{dataset}", {})
            text = ", ".join(f"{_words(name)} {setting}" for name, setting in settings.items())
            protocols.setdefault(text, []).append(dataset)
        for text, names in protocols.items():
            place = f" of {', '.join(names)}" if len(protocols) > 1 else ""
            lines += [markdown_text(f"Protocol{place}: {text}.")] if text else []
    if _retrieval_picture(folder) is not None:
        lines += ["", f"![captions with the images retrieved for them]({PICTURE})", ""]
        lines += ["Captions and the images with the highest scores; a green frame marks the caption's own image."]
    return "\n".join(lines)


def _table(folder: Path, values: Mapping[MetricKey, float], task: str) -> Iterator[str]:
    """Yield the lines of a table: a row for each dataset and direction or projection, a column for each metric."""
    keys = [key for key in values if not key.metric.endswith(DEVIATION)]
    metrics = list(dict.fromkeys(key.metric for key in keys))
    rows = list(dict.fromkeys((key.dataset, key.protocol) for key in keys))
    has_protocol = any(protocol for _, protocol in rows)
    heads = ["dataset", *(["features" if task == "linear_probe" else "direction"] if has_protocol else [])]
    yield f"| {' | '.join([*heads, *map(_words, metrics)])} |"
    yield f"|{' --- |' * len(heads)}{' ---: |' * len(metrics)}"
    for dataset, protocol in rows:
        place = f"{protocol} projection" if task == "linear_probe" else _words(protocol)
        cells: list[str] = [markdown_text(dataset), *([markdown_text(place)] if has_protocol else [])]
        for metric in metrics:
            key = MetricKey(task, dataset, protocol, metric)
            if (value := values.get(key)) is None:
                cells.append("")
                continue
            deviation = values.get(key.deviation)
            cell = f"{value:.1f}" if deviation is None else f"{value:.1f} ± {deviation:.1f}"
            # The outcomes count the test samples; the linear probe has the test split of zero-shot classification.
            outcomes = "retrieval" if task == "retrieval" else "zero_shot"
            path = io.below(folder, f"evaluation/{outcomes}/{dataset}.npz")
            if metric.startswith(("top", "recall_at_")) and task in TITLES and path.exists():
                if task != "retrieval":
                    count = len(read_arrays(path, ["all_labels"])["all_labels"])
                else:
                    arrays = read_arrays(path, ["gallery", "all_places"])
                    count = int(arrays["gallery"]) if "image_to_text" in protocol else len(arrays["all_places"])
                low, high = wilson(value / 100, count)
                cell += f" ({100 * low:.1f} to {100 * high:.1f})"
            cells.append(cell)
        yield f"| {' | '.join(cells)} |"


def _words(name: str) -> str:
    return name.replace("_", " ")


def measured(record: RunRecord | None) -> dict[MetricKey, float]:
    """Return the metrics of a run in percent: without the cost of its training, and without losses."""
    metrics = {} if record is None else record.metrics
    return {key: value for key, value in metrics.items() if key.task not in ("training", VALIDATION)}


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the 95% interval of a share of `count` independent samples (Wilson 1927)."""
    z = 1.96  # half the width of the interval, in standard deviations
    center = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return max(0.0, center - half), min(1.0, center + half)


def _retrieval_picture(folder: Path | None) -> Path | None:
    """Return the picture of the report with captions and the images retrieved for them, None if there is none."""
    return min((folder / "report").glob("retrieval_*.png"), default=None) if folder is not None else None


@dataclass(frozen=True)
class Format:
    """mark: a file that every export has, written last. faults: reasons why a model cannot be represented.

    write: writes the files to a folder. packages: modules that it imports; extra: the extra that installs them.
    """

    mark: str
    write: Callable[[LoadedModel, Path], None]
    faults: Callable[[LoadedModel], list[str]] = lambda model: []
    packages: tuple[str, ...] = ("tokenizers",)
    extra: str = "hf"


FORMATS = {
    "open_clip": Format("open_clip_config.json", open_clip.write_open_clip, open_clip.faults, ()),
    "transformers": Format("config.json", transformers.write_transformers, transformers.faults),
    "hub": Format(CONFIG, write_hub, faults),
    "torch": Format("score.pt2", graphs.write_torch),
    "onnx": Format(
        "score.onnx", graphs.write_onnx, packages=("tokenizers", "onnx", "onnxscript", "onnxruntime"), extra="onnx"
    ),
}
READABLE = ("hub", "open_clip", "transformers")
"""Formats that `load` reads, told apart by their marks, the first one first."""
