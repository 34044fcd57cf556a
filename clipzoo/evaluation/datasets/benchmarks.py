"""Open an evaluation dataset by name: a benchmark of the papers, or any dataset in the tar layout. Needs no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from clipzoo.errors import ConfigError, nearest
from clipzoo.evaluation.datasets import prompts, readers
from clipzoo.evaluation.datasets.dataset import (
    ClassificationDataset,
    EvaluationDataset,
    RetrievalDataset,
    catalogue,
    check_size,
)
from clipzoo.evaluation.datasets.prompts import Protocol
from clipzoo.evaluation.datasets.tar import open_tar_dataset, write_classification, write_retrieval
from clipzoo.io import below, folder_name


class MissingDatasetError(ConfigError):
    """The dataset is not on this machine; the message says how to get it."""


def open_benchmark(name: str, root: Path, protocol: Protocol) -> EvaluationDataset:
    """Open <root>/<name>, as tar shards or in the files that its authors distribute.

    protocol: source of the prompts: "slip" (WPSE, KME-CLIP), "clip" (CLOOB, NUCLR), or "set", the dataset's own class
    names and templates without verification. Raises MissingDatasetError, and ConfigError if size, class names or
    prompts are not those of the papers.
    """
    benchmark, folder = catalogue().get(name), root / folder_name(name, "evaluation dataset")
    in_tars = any(folder.glob("*/nshards.txt"))
    if benchmark is None and not in_tars:
        others = sorted({path.parent.parent.name for path in root.glob("*/*/nshards.txt")})
        hint = nearest(name, [*others, *catalogue()]) or "."
        make_hint = "`clipzoo datasets make` makes one from your own images."
        command = "`clipzoo world` generates the demo's." if "demo" in root.parts else make_hint
        raise MissingDatasetError(
            f"no evaluation dataset {name} in {root}, and none of that name in the catalogue{hint} {command}"
        )
    dataset = open_tar_dataset(root, name) if in_tars else read_source(name, folder)
    if benchmark is None:
        return dataset
    check_size(dataset, benchmark)
    if isinstance(dataset, RetrievalDataset) or (in_tars and protocol == "set"):
        return dataset
    if protocol == "set":
        names, protocol = [class_name.replace("_", " ") for class_name in dataset.class_names], "slip"
    else:
        names = prompts.class_names(dataset.class_names, benchmark["names"], name, folder)
    templates = prompts.templates(benchmark["templates"], protocol, name, folder)
    return replace(dataset, class_names=names, templates=templates, metric=benchmark["metric"])


def convert(name: str, source: Path, root: Path, protocol: Protocol = "slip") -> EvaluationDataset:
    """Read benchmark `name` from the distributed files in `source`, write <root>/<name> as tar shards, and open it."""
    if name not in catalogue():
        raise ConfigError(f"the catalogue has no dataset {name}; it has {', '.join(catalogue())}")
    benchmark, dataset, folder = catalogue()[name], read_source(name, source), below(root, name, links=True)
    if isinstance(dataset, RetrievalDataset):
        captions: list[list[str]] = [[] for _ in range(len(dataset.images))]
        for caption, image in zip(dataset.captions, dataset.caption_image, strict=True):
            captions[image].append(caption)
        examples = zip(map(dataset.images.encoded, range(len(captions))), captions, strict=True)
        write_retrieval(folder, recipe=benchmark.get("recipe", "the official split"), examples=examples)
        return open_benchmark(name, root, protocol)
    check_size(dataset, benchmark)
    write_classification(
        folder,
        class_names=prompts.class_names(dataset.class_names, benchmark["names"], name, source),
        templates=prompts.templates(benchmark["templates"], protocol, name, source),
        metric=dataset.metric,
        recipe=benchmark.get("recipe", "the official splits"),
        splits={
            split: zip(map(part.images.encoded, range(len(part))), part.labels, strict=True)
            for split, part in dataset.splits.items()
        },
    )
    return open_benchmark(name, root, protocol)


def read_source(name: str, folder: Path) -> EvaluationDataset:
    """Read a benchmark from the files that its authors distribute, without templates. Raises MissingDatasetError."""
    benchmark = catalogue()[name]
    reader = getattr(readers, benchmark["reader"])
    try:
        if "captions" in benchmark:
            images, captions = reader(folder, benchmark["split"], benchmark["captions"])
            caption_image = [index for index, texts in enumerate(captions) for _ in texts]
            return RetrievalDataset(name, images, [caption for texts in captions for caption in texts], caption_image)
        class_names, splits = reader(folder)
        return ClassificationDataset(name, class_names, (), benchmark["metric"], splits)
    except FileNotFoundError as error:
        command = benchmark["get"].replace("{folder}", str(folder))
        raise MissingDatasetError(
            f"{name} is not in {folder} ({error}). Licence: {benchmark['licence']}. To get it: {command}"
        ) from error
