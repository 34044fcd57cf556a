"""Open an evaluation dataset by name: a benchmark of the catalogue, or any dataset in the tar layout or in Parquet.

Datasets in the tar layout are also read from an fsspec URL, such as https:// or hf://. Needs no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from clipzoo import io
from clipzoo.data.locations import copy_location
from clipzoo.errors import ConfigError, nearest
from clipzoo.evaluation.datasets import prompts, readers, tables, tar
from clipzoo.evaluation.datasets.dataset import (
    Benchmark,
    ChoiceDataset,
    ClassificationDataset,
    EvaluationDataset,
    RetrievalDataset,
    catalogue,
    check_size,
)
from clipzoo.evaluation.datasets.prompts import Protocol
from clipzoo.io import below, folder_name
from clipzoo.io.stores import is_missing, is_url

KEY = "eval.root"
LISTS = (tar.NAMES_FILE, tar.TEMPLATES_FILE, "dataset_type.txt", "meta.json")
PARALLEL_FILES = 4
MARK = "sizes.json"
"""Written last: size of every copied file by its name."""


class MissingDatasetError(ConfigError):
    """The dataset is not on this machine; the message says how to get it."""


def open_benchmark(
    name: str,
    root: Path | str,
    protocol: Protocol,
    splits: Collection[str] = ("train", "val", "test"),
    cache: Path = Path("data/downstream_cache"),
) -> EvaluationDataset:
    """Open a dataset below `root`, as tar shards, in Parquet or Arrow, or in the files that its authors distribute.

    root: a folder, or an fsspec URL of datasets in tar shards, which are copied into `cache`; {name} in it is replaced
    by CLIP_benchmark's name of the dataset. protocol: source of the prompts: "slip" (WPSE, KME-CLIP), "clip" (CLOOB,
    NUCLR), or "set", the dataset's own class names and templates without verification. splits: those to copy. Raises
    MissingDatasetError, and ConfigError if size, class names or prompts are not those of the papers.
    """
    facts = catalogue().get(name, {})
    folder_name(name, "evaluation dataset")
    # The folder of the dataset in tar shards: its own, or that of CLIP_benchmark's or DataComp's name.
    exported = facts.get("wds", [name])
    names = [name, *(form.format(of) for of in exported for form in ("wds_{}", "wds_{}_test", "{}"))]
    places = [str(root).replace("{name}", of) for of in exported]
    if "{name}" not in str(root):
        places = [f"{str(root).rstrip('/')}/{folder_name(of, 'evaluation dataset')}" for of in dict.fromkeys(names)]
    folders = (local_copy(place, splits, cache) if is_url(place) else Path(place) for place in places)
    place = next((folder for folder in folders if folder is not None and any(folder.glob("*/nshards.txt"))), None)
    # Datasets of the same images share a folder.
    folder = place or (Path() if is_url(str(root)) else below(Path(root), facts.get("folder", name), links=True))
    in_tables = not place and "examples" not in facts and bool(tables.table_files(folder))
    if not facts and not place and not in_tables:
        others = [] if is_url(str(root)) else tar.dataset_names(root)
        hint = nearest(name, [*others, *catalogue()]) or "."
        make, demo = "`clipzoo datasets make` makes one from your own images.", "`clipzoo world` generates the demo's."
        fault = f"no evaluation dataset {name} in {root}, and none of that name in the catalogue{hint}"
        raise MissingDatasetError(f"{fault} {demo if 'demo' in str(root) else make}")
    if place:
        dataset = replace(tar.open_tar_dataset(place.parent, place.name, facts.get("group_column")), name=name)
    elif in_tables:
        dataset = tables.open_tables(folder, name)
    else:
        dataset = read_source(name, folder, root)
    if facts:
        check_size(dataset, facts)
    if not isinstance(dataset, ClassificationDataset):
        return dataset
    return _with_prompts(dataset, facts, protocol, folder, own=bool(place))


def local_copy(url: str, splits: Collection[str], cache: Path) -> Path | None:
    """Return a folder in `cache` with the lists and these splits of the dataset; None if the URL has none of them.

    Complete files are not requested again, also after an interruption. Raises ConfigError for a copy of a wrong size,
    TrainingError if the server does not recover in time.
    """
    # A page of the hub that lists files, as CLIP_benchmark takes it, becomes the address of the files.
    url = re.sub(r"^(https://huggingface\.co/datasets/[^/]+/[^/]+)/tree/", r"\1/resolve/", url.rstrip("/"))
    name = re.sub(r"/(resolve/)?main$", "", url).rpartition("/")[2]
    folder = below(cache, f"{hashlib.sha256(url.encode()).hexdigest()[:12]}-{folder_name(name, KEY)}")
    cache.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock, ThreadPoolExecutor(PARALLEL_FILES) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mark = folder / MARK
        sizes = io.read_json(mark, 64 * io.MB, f"remove {folder}") if mark.exists() else {}
        for file, size in sizes.items():
            held = path.stat().st_size if (path := below(folder, file)).exists() else None
            if held != size:
                raise ConfigError(f"{path} has {held} bytes in place of {size}: remove {folder} to download it again")
        for split in splits:
            counter = f"{split}/nshards.txt"
            if counter in sizes or (sizes := sizes | {counter: download(url, counter, folder)})[counter] is None:
                continue
            count = io.read_text(below(folder, counter), io.MB).strip()
            if not re.fullmatch("[0-9]{1,9}", count):
                raise ConfigError(f"{url}/{counter} must hold the number of tars, not {count[:40]!r}")
            lists = () if LISTS[0] in sizes else LISTS
            files = [*lists, *(f"{split}/{shard}.tar" for shard in range(int(count)))]
            sizes |= dict(zip(files, pool.map(lambda file: download(url, file, folder), files), strict=True))
            if missing := [file for file in files if file.endswith(".tar") and sizes[file] is None]:
                raise ConfigError(f"{url}/{missing[0]} is missing, but {counter} counts it")
            io.write_json(mark, sizes)
    return folder if any(sizes[f"{split}/nshards.txt"] is not None for split in splits) else None


def download(url: str, file: str, folder: Path) -> int | None:
    """Copy <url>/<file> into `folder`; return its size in bytes, or None if the URL has no such file."""
    target = below(folder, file)
    try:
        if not target.exists():
            with io.whole(target, only_full_disks=True) as output:
                copy_location(f"{url}/{file}", output, KEY)
        return target.stat().st_size
    except OSError as error:
        if is_missing(error):
            return None
        raise ConfigError(f"{KEY}: {url}/{file} cannot be read: {error}") from error


def _with_prompts(
    dataset: ClassificationDataset, facts: Benchmark, protocol: Protocol, folder: Path, own: bool
) -> ClassificationDataset:
    """Return the dataset with the catalogue's metric, names and templates. own: its own are ready, as in tar shards."""
    names, templates = list(dataset.class_names), list(dataset.templates)
    # ImageNet's own names are numbers, for example.
    named = "names" in facts and (protocol != "set" or (not own and facts["names"]["source"] != "own"))
    if named:
        names = prompts.class_names(names, facts["names"], dataset.name, folder)
    elif not own:
        names = [class_name.replace("_", " ") for class_name in names]
    if "templates" in facts and not (own and protocol == "set" and templates):
        chosen = "clip" if protocol == "set" else protocol
        templates = prompts.templates(facts["templates"], chosen, dataset.name, folder)
    metric = facts.get("metric", dataset.metric)
    return replace(dataset, class_names=names, templates=templates or [prompts.DEFAULT], metric=metric)


def convert(name: str, source: Path, root: Path, protocol: Protocol = "slip") -> EvaluationDataset:
    """Read benchmark `name` from the distributed files in `source`, write <root>/<name> as tar shards, and open it."""
    if name not in catalogue():
        raise ConfigError(f"the catalogue has no dataset {name}; it has {', '.join(catalogue())}")
    benchmark, folder = catalogue()[name], below(root, name, links=True)
    in_tables = "examples" not in benchmark and tables.table_files(source)
    dataset = tables.open_tables(source, name) if in_tables else read_source(name, source)
    check_size(dataset, benchmark)
    recipe = benchmark.get("recipe", "the official splits")
    if isinstance(dataset, RetrievalDataset):
        captions: list[list[str]] = [[] for _ in range(len(dataset.images))]
        for caption, image in zip(dataset.captions, dataset.caption_image, strict=True):
            captions[image].append(caption)
        examples = zip(map(dataset.images.encoded, range(len(captions))), captions, strict=True)
        tar.write_retrieval(folder, recipe=recipe, examples=examples)
    elif isinstance(dataset, ChoiceDataset):
        tar.write_choice(folder, recipe, dataset.captions, dataset.examples, dataset.images.encoded)
    elif dataset.groups or dataset.splits["test"].all_labels:
        raise ConfigError(f"{name} has groups or several labels, which the written layout does not hold")
    else:
        dataset = _with_prompts(dataset, benchmark, protocol, source, own=False)
        tar.write_classification(
            folder,
            class_names=dataset.class_names,
            templates=dataset.templates,
            metric=dataset.metric,
            recipe=recipe,
            splits={
                split: zip(map(part.images.encoded, range(len(part))), part.labels, strict=True)
                for split, part in dataset.splits.items()
            },
        )
    return open_benchmark(name, root, protocol)


def read_source(name: str, folder: Path, root: Path | str = "") -> EvaluationDataset:
    """Read a benchmark from its authors' files, without templates. root: for the message of MissingDatasetError."""
    benchmark = catalogue()[name]
    try:
        if benchmark["reader"] == "tars" or is_url(str(root)):
            raise FileNotFoundError(f"{root or folder} has no <split>/nshards.txt of it")
        reader = getattr(readers, benchmark["reader"])
        if "examples" in benchmark:
            return ChoiceDataset(name, *reader(folder, benchmark["layout"]))
        if "captions" in benchmark:
            return RetrievalDataset.of_images(name, *reader(folder, benchmark))
        class_names, splits, *groups = reader(folder, benchmark)
        class_names = [text.lower() for text in class_names] if benchmark.get("lowercase") else class_names
        return ClassificationDataset(name, class_names, (), benchmark["metric"], splits, *groups)
    except FileNotFoundError as error:
        facts = f"Licence: {benchmark['licence']}. To get it: {benchmark['get'].replace('{folder}', str(folder))}"
        raise MissingDatasetError(f"{name} is not in {folder} ({error}). {facts}") from error
