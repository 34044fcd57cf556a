"""Local copies of evaluation datasets in the tar layout that an fsspec URL names, such as https:// or hf://."""

from __future__ import annotations

import fcntl
import hashlib
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clipzoo import io
from clipzoo.data.locations import copy_location
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.tar import NAMES_FILE, TEMPLATES_FILE
from clipzoo.io.stores import is_missing

KEY = "eval.root"
CACHE = Path("data/downstream_cache")
LISTS = (NAMES_FILE, TEMPLATES_FILE, "dataset_type.txt", "meta.json")
PARALLEL_FILES = 4
MARK = "sizes.json"
"""Written last: size of every copied file by its name."""


def local_copy(url: str, splits: Collection[str], cache: Path) -> Path | None:
    """Return a folder in `cache` with the lists and these splits of the dataset; None if the URL has none of them.

    Complete files are not requested again, also after an interruption. Raises ConfigError for a copy of a wrong size,
    TrainingError if the server does not recover in time.
    """
    # A page of the hub that lists files, as CLIP_benchmark takes it, becomes the address of the files.
    url = re.sub(r"^(https://huggingface\.co/datasets/[^/]+/[^/]+)/tree/", r"\1/resolve/", url.rstrip("/"))
    name = re.sub(r"/(resolve/)?main$", "", url).rpartition("/")[2]
    folder = io.below(cache, f"{hashlib.sha256(url.encode()).hexdigest()[:12]}-{io.folder_name(name, KEY)}")
    cache.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock, ThreadPoolExecutor(PARALLEL_FILES) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mark = folder / MARK
        sizes = io.read_json(mark, 64 * io.MB, f"remove {folder}") if mark.exists() else {}
        for file, size in sizes.items():
            held = path.stat().st_size if (path := io.below(folder, file)).exists() else None
            if held != size:
                raise ConfigError(f"{path} has {held} bytes in place of {size}: remove {folder} to download it again")
        for split in splits:
            counter = f"{split}/nshards.txt"
            if counter in sizes or (sizes := sizes | {counter: download(url, counter, folder)})[counter] is None:
                continue
            count = io.read_text(io.below(folder, counter), io.MB).strip()
            if not re.fullmatch("[0-9]{1,9}", count):
                raise ConfigError(f"{url}/{counter} must hold the number of tars, not {count[:40]!r}")
            files = [
                *(LISTS if LISTS[0] not in sizes else ()),
                *(f"{split}/{shard}.tar" for shard in range(int(count))),
            ]
            sizes |= dict(zip(files, pool.map(lambda file: download(url, file, folder), files), strict=True))
            if missing := [file for file in files if file.endswith(".tar") and sizes[file] is None]:
                raise ConfigError(f"{url}/{missing[0]} is missing, but {counter} counts it")
            io.write_json(mark, sizes)
    return folder if any(sizes[f"{split}/nshards.txt"] is not None for split in splits) else None


def download(url: str, file: str, folder: Path) -> int | None:
    """Copy <url>/<file> into `folder`; return its size in bytes, or None if the URL has no such file."""
    target = io.below(folder, file)
    try:
        if not target.exists():
            with io.whole(target, only_full_disks=True) as output:
                copy_location(f"{url}/{file}", output, KEY)
        return target.stat().st_size
    except OSError as error:
        if is_missing(error):
            return None
        raise ConfigError(f"{KEY}: {url}/{file} cannot be read: {error}") from error
