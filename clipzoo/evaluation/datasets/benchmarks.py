"""Open an evaluation dataset by name: a benchmark of the papers, or any dataset in the tar layout. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from clipzoo.errors import ConfigError, nearest
from clipzoo.evaluation.datasets import prompts, readers
from clipzoo.evaluation.datasets.dataset import (
    Benchmark,
    ClassificationDataset,
    EvaluationDataset,
    LabelledSplit,
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
    if benchmark is None:
        if not is_tar_dataset(folder):
            raise MissingDatasetError(_unknown(root, name))
        return open_tar_dataset(root, name)
    if not is_tar_dataset(folder):
        return _open_source(name, folder, benchmark, protocol)
    dataset = open_tar_dataset(root, name)
    check_size(dataset, benchmark)
    if isinstance(dataset, RetrievalDataset) or protocol == "set":
        return dataset
    names = prompts.class_names(dataset.class_names, benchmark["names"], name, folder)
    templates = prompts.templates(benchmark["templates"], protocol, name, folder)
    return replace(dataset, class_names=names, templates=templates, metric=benchmark["metric"])


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


def convert(name: str, source: Path, root: Path, protocol: Protocol = "slip") -> EvaluationDataset:
    """Read benchmark `name` from the distributed files in `source`, write <root>/<name> as tar shards, and open it."""
    if name not in catalogue():
        raise ConfigError(f"the catalogue has no dataset {name}; it has {', '.join(catalogue())}")
    benchmark = catalogue()[name]
    data = read_source(name, source, benchmark)
    if isinstance(data, SourceRetrieval):
        images = (data.images.encoded(index) for index in range(len(data.images)))
        recipe = benchmark.get("recipe", "the official split")
        write_retrieval(below(root, name, links=True), recipe=recipe, examples=zip(images, data.captions, strict=True))
        return open_benchmark(name, root, protocol)
    check_size(_unprompted(name, data, benchmark), benchmark)
    write_classification(
        below(root, name, links=True),
        class_names=prompts.class_names(data.class_names, benchmark["names"], name, source),
        templates=prompts.templates(benchmark["templates"], protocol, name, source),
        metric=benchmark["metric"],
        recipe=benchmark.get("recipe", "the official splits"),
        splits={split: _encoded(samples) for split, samples in data.splits.items()},
    )
    return open_benchmark(name, root, protocol)


def _encoded(samples: LabelledSplit) -> Iterator[tuple[bytes, int]]:
    for index, label in enumerate(samples.labels):
        yield samples.images.encoded(index), label


def _open_source(name: str, folder: Path, benchmark: Benchmark, protocol: Protocol) -> EvaluationDataset:
    data = read_source(name, folder, benchmark)
    if isinstance(data, SourceRetrieval):
        captions = [caption for captions in data.captions for caption in captions]
        caption_image = [index for index, captions in enumerate(data.captions) for _ in captions]
        pairs = RetrievalDataset(name, data.images, captions, caption_image)
        check_size(pairs, benchmark)
        return pairs
    dataset = _unprompted(name, data, benchmark)
    check_size(dataset, benchmark)
    listed = prompts.templates(benchmark["templates"], "slip" if protocol == "set" else protocol, name, folder)
    names: Sequence[str] = [class_name.replace("_", " ") for class_name in data.class_names]
    if protocol != "set":
        names = prompts.class_names(data.class_names, benchmark["names"], name, folder)
    return replace(dataset, class_names=names, templates=listed)


def _unprompted(name: str, data: SourceClassification, benchmark: Benchmark) -> ClassificationDataset:
    """The dataset with its own class names and no templates yet."""
    return ClassificationDataset(name, data.class_names, (), benchmark["metric"], data.splits)


def _unknown(root: Path, name: str) -> str:
    others = sorted({path.parent.parent.name for path in root.glob("*/*/nshards.txt")})
    hint = nearest(name, [*others, *catalogue()]) or "."
    own = "`clipzoo datasets make` makes one from your own images."
    command = "`clipzoo world` generates the demo's." if "demo" in root.parts else own
    return f"no evaluation dataset {name} in {root}, and none of that name in the catalogue{hint} {command}"
