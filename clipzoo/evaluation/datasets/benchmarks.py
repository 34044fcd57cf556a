"""Open an evaluation dataset by name: a benchmark of the papers, or any dataset in the tar layout. Needs no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from clipzoo.errors import ConfigError, nearest
from clipzoo.evaluation.datasets import prompts, readers
from clipzoo.evaluation.datasets.dataset import (
    Benchmark,
    ClassificationDataset,
    EvaluationDataset,
    RetrievalDataset,
    catalogue,
    check_size,
)
from clipzoo.evaluation.datasets.prompts import Protocol
from clipzoo.evaluation.datasets.readers import SourceClassification, SourceRetrieval
from clipzoo.evaluation.datasets.tar import is_tar_dataset, open_tar_dataset, write_classification, write_retrieval
from clipzoo.io import below, folder_name


class MissingDatasetError(ConfigError):
    """The dataset is not on this machine; the message says how to get it."""


def open_benchmark(name: str, root: Path, protocol: Protocol) -> EvaluationDataset:
    """Open <root>/<name>, as tar shards or in the files that its authors distribute.

    protocol: whose prompts: "slip" (WPSE, KME-CLIP), "clip" (CLOOB, NUCLR), or "set", the dataset's own class names and
    templates without verification. Raises MissingDatasetError, and ConfigError if size, class names or prompts are not
    those of the papers.
    """
    benchmark, folder = catalogue().get(name), root / folder_name(name, "evaluation dataset")
    if is_tar_dataset(folder):
        dataset = open_tar_dataset(root, name)
        if benchmark is None:
            return dataset
        check_size(dataset, benchmark)
        if isinstance(dataset, RetrievalDataset) or protocol == "set":
            return dataset
        names = prompts.class_names(dataset.class_names, benchmark["names"], name, folder)
        templates = prompts.templates(benchmark["templates"], protocol, name, folder)
        return replace(dataset, class_names=names, templates=templates, metric=benchmark["metric"])
    if benchmark is None:
        others = sorted({path.parent.parent.name for path in root.glob("*/*/nshards.txt")})
        hint = nearest(name, [*others, *catalogue()]) or "."
        own = "`clipzoo datasets make` makes one from your own images."
        command = "`clipzoo world` generates the demo's." if "demo" in root.parts else own
        raise MissingDatasetError(
            f"no evaluation dataset {name} in {root}, and none of that name in the catalogue{hint} {command}"
        )

    # The files that the authors distribute.
    data = read_source(name, folder, benchmark)
    if isinstance(data, SourceRetrieval):
        captions = [caption for captions in data.captions for caption in captions]
        caption_image = [index for index, captions in enumerate(data.captions) for _ in captions]
        pairs = RetrievalDataset(name, data.images, captions, caption_image)
        check_size(pairs, benchmark)
        return pairs
    classified = ClassificationDataset(name, data.class_names, (), benchmark["metric"], data.splits)
    check_size(classified, benchmark)
    templates = prompts.templates(benchmark["templates"], "slip" if protocol == "set" else protocol, name, folder)
    if protocol == "set":
        names = [own.replace("_", " ") for own in data.class_names]
    else:
        names = prompts.class_names(data.class_names, benchmark["names"], name, folder)
    return replace(classified, class_names=names, templates=templates)


def convert(name: str, source: Path, root: Path, protocol: Protocol = "slip") -> EvaluationDataset:
    """Read benchmark `name` from the distributed files in `source`, write <root>/<name> as tar shards, and open it."""
    if name not in catalogue():
        raise ConfigError(f"the catalogue has no dataset {name}; it has {', '.join(catalogue())}")
    benchmark = catalogue()[name]
    data = read_source(name, source, benchmark)
    folder = below(root, name, links=True)
    if isinstance(data, SourceRetrieval):
        images = (data.images.encoded(index) for index in range(len(data.images)))
        recipe = benchmark.get("recipe", "the official split")
        write_retrieval(folder, recipe=recipe, examples=zip(images, data.captions, strict=True))
        return open_benchmark(name, root, protocol)
    check_size(ClassificationDataset(name, data.class_names, (), benchmark["metric"], data.splits), benchmark)
    write_classification(
        folder,
        class_names=prompts.class_names(data.class_names, benchmark["names"], name, source),
        templates=prompts.templates(benchmark["templates"], protocol, name, source),
        metric=benchmark["metric"],
        recipe=benchmark.get("recipe", "the official splits"),
        splits={
            split: zip(map(part.images.encoded, range(len(part))), part.labels, strict=True)
            for split, part in data.splits.items()
        },
    )
    return open_benchmark(name, root, protocol)


def read_source(name: str, folder: Path, benchmark: Benchmark) -> SourceClassification | SourceRetrieval:
    """Read a benchmark in the files that its authors distribute; MissingDatasetError where files are missing."""
    try:
        if "captions" in benchmark:
            return getattr(readers, benchmark["reader"])(folder, benchmark["split"], benchmark["captions"])
        return getattr(readers, benchmark["reader"])(folder)
    except FileNotFoundError as error:
        command = benchmark["get"].replace("{folder}", str(folder))
        raise MissingDatasetError(
            f"{name} is not in {folder} ({error}). Licence: {benchmark['licence']}. To get it: {command}"
        ) from error
