"""Files of every format but models (see hostile_models), made to harm whoever reads them.

A format writes intact files once. A case is a copy of them in which one file is replaced, cut or changed in one value,
and which is then read as a user reads it.
"""

from __future__ import annotations

import csv
import faulthandler
import gzip
import io
import json
import os
import pickle
import random
import shutil
import signal
import socket
import struct
import sys
import tarfile
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import torch
import yaml

import clipzoo
from clipzoo.cli.__main__ import main
from clipzoo.data.images import ImageTransform
from clipzoo.data.plan import generator
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError, PartError, TrainingError
from clipzoo.evaluation.datasets.benchmarks import open_benchmark
from clipzoo.evaluation.datasets.dataset import RetrievalDataset
from clipzoo.evaluation.datasets.readers import karpathy
from clipzoo.evaluation.validation import open_validation
from clipzoo.io import MB, read_json_lines
from clipzoo.lab.methods.lab import cells, read_settings
from clipzoo.lab.methods.page import write_page
from clipzoo.lab.studies import run as studies
from clipzoo.training.tuned import FeatureCache
from clipzoo.types import Batch, Features
from tests.support import searches
from tests.support.evaluation_sets import batch_encoder, write_sets
from tests.support.exported import loaded
from tests.support.hostile_models import Call, special_files
from tests.support.lab_records import write_records
from tests.support.shards import numbered, picture, shard_data, write_numbered, write_shard

SECONDS, BYTES = 60, 10**9
"""Most time of a case, of the processor and in all, and most memory."""
Damage = Callable[[Path], Any]
OUTSIDE = Path("../outside")
"""Folder beside that of a case, the working directory; nothing may be written to it."""
INTACT = "intact"
CANARY, SECRET = OUTSIDE / "canary", OUTSIDE / "secret"
"""File that hostile code creates, and a file that no case may change."""


def absolute(path: Path) -> str:
    """The absolute path of a file outside; `run_cases` puts the temporary files beside that folder."""
    return str(Path(tempfile.gettempdir()).parent / OUTSIDE.name / path.name)


@cache
def damages() -> dict[str, Damage]:
    """Contents and kinds of files that no reader expects."""
    touch = f"touch {CANARY}"

    def cut(path: Path, share: float) -> None:
        os.truncate(path, int(path.stat().st_size * share))

    def replaced(path: Path, content: bytes | None = None, make: Damage | None = None) -> None:
        path.unlink()
        path.write_bytes(content) if content is not None else make and make(path)

    contents = {
        "random bytes": random.Random(0).randbytes(5000), "not UTF-8": b"\xff\xfe\x00\xd8" * 500,
        "a pickle": pickle.dumps(Call(os.system, touch)), "a packed 100 MB": gzip.compress(bytes(10**8), 1),
        "lists 200,000 deep": b"[" * 200_000 + b"]" * 200_000, "mappings 200,000 deep": b'{"a":' * 200_000,
        "a number of 5,000 digits": b"9" * 5000, "a string without end": b'"' + b"a" * 10**6,
        "3 million values": b"[" + b"1," * 3 * 10**6 + b"1]", "two million lines": b"{}\n" * 2 * 10**6,
        "a YAML call": f"!!python/object/apply:os.system ['{touch}']".encode(),
        "YAML aliases": b"a0: &a0 [x]\n" + b"".join(b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 10))
                                                       for n in range(1, 12)),
    }  # fmt: skip

    def flipped(path: Path, byte: int) -> None:
        # Size and time of modification stay, as on a bad disk.
        status, content = path.stat(), bytearray(path.read_bytes() or b"a")
        content[byte % len(content)] ^= 1
        path.write_bytes(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    return {
        # In a shard of `write_numbered`: of the pixels of an image, of a name, and of the padding of a header.
        **{f"a bit of byte {byte}": partial(flipped, byte=byte) for byte in (15_932, 12_288, 409)},
        **{name: partial(replaced, make=make) for name, make in special_files().items()},
        "a socket": partial(replaced, make=lambda path: socket.socket(socket.AF_UNIX).bind(os.path.relpath(path))),
        "a link to a secret": partial(replaced, make=lambda path: path.symlink_to(SECRET)),
        "nothing": partial(replaced, make=lambda path: None),
        **{f"{share:.0%} of it": partial(cut, share=share) for share in (0.05, 0.5, 0.9, 0.99)},
        **{name: partial(replaced, content=content) for name, content in contents.items()},
    }  # fmt: skip


def values() -> dict[str, Any]:
    """Values that no reader expects."""
    call = {"_target_": "os.system", "_args_": [f"touch {CANARY}"]}
    return {
        "null": None, "true": True, "a list": [], "a mapping": {}, "a list of null": [None], "no text": "", "-1": -1,
        "10^9": 10**9, "10^18": 10**18, "10^400": 10**400, "1e308": 1e308, "NaN": float("nan"), "inf": float("inf"),
        "upwards": "../../../outside/secret", "absolute": absolute(SECRET), "a device": "/dev/zero",
        "parts": "a//../.", "reserved": "..", "a surrogate": "\ud800", "NUL": "a\0b", "line ends": "a\n\r\x1b[2Jb",
        "300 letters": "a" * 300, "300,000 letters": "a" * 300_000, "a call": call, "a variable": "${oc.env:HOME}",
        "a pipe": f"pipe:touch {CANARY}", "10^5 values": [1] * 10**5, "<script>": "<script>alert(1)</script>",
        "deep": json.loads("[" * 150 + "]" * 150),
    }  # fmt: skip


def _table(text: str, delimiter: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text), delimiter=delimiter))


def _as_table(rows: Sequence[Sequence[Any]], delimiter: str) -> str:
    stream = io.StringIO()
    csv.writer(stream, delimiter=delimiter).writerows([row if isinstance(row, list) else [row] for row in rows])
    return stream.getvalue()


FORMATS_OF_TEXT: dict[str, tuple[Callable[[str], Any], Callable[[Any], str]]] = {
    ".json": (json.loads, json.dumps),
    ".yaml": (yaml.safe_load, yaml.safe_dump),
    **dict.fromkeys((".jsonl", ".log"), (lambda text: [json.loads(line) for line in text.splitlines()],
                                        lambda rows: "".join(json.dumps(row) + "\n" for row in rows))),
    ".csv": (partial(_table, delimiter=","), partial(_as_table, delimiter=",")),
    ".tsv": (partial(_table, delimiter="\t"), partial(_as_table, delimiter="\t")),
    ".txt": (str.splitlines, lambda lines: "".join(f"{line}\n" for line in lines)),
}  # fmt: skip
"""Reader and writer of a text's values by suffix."""


def places(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to every value in nested mappings and lists."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield (*above, key)
        yield from places(child, (*above, key))


def changed(path: Path, place: tuple[Any, ...], value: Any) -> None:
    """Set a value of a file of text."""
    read, write = FORMATS_OF_TEXT[path.suffix]
    tree = node = read(path.read_text())
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    path.write_bytes(write(tree).encode(errors="surrogatepass"))


# Images and shards.


@cache
def images() -> dict[str, bytes]:
    def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
        header = (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in (header, *chunks, (b"IEND", b""))
        )

    zeros = zlib.compress(bytes(10**8))
    whole = picture(1)
    return {
        "10^10 pixels": png(10**5, 10**5, (b"IDAT", zeros)), "2^31 pixels wide": png(2**31 - 1, 1, (b"IDAT", zeros)),
        "no pixels": png(0, 0), "too few pixels": png(100, 100, (b"IDAT", zlib.compress(b"1"))),
        "too many pixels": png(20, 20, (b"IDAT", zeros)), "packed text": png(20, 20, (b"zTXt", b"a\0\0" + zeros)),
        "a packed profile": png(20, 20, (b"iCCP", b"a\0\0" + zeros), (b"IDAT", zlib.compress(bytes(20 * 61)))),
        "half an image": whole[: len(whole) // 2], "no image": b"<svg/>", "empty": b"",
        "a pickle": pickle.dumps(Call(os.system, "true")), "PostScript": b"%!PS-Adobe-3.0 EPSF\n(%pipe%id) (w) file",
        "TIFF that loops": struct.pack("<2sHIHHHIIIH", b"II", 42, 8, 1, 256, 4, 1, 10**9, 8, 8),
        "GIF without end": picture(1, file_format="GIF")[:-1] * 100,
    }  # fmt: skip


def tar_headers() -> dict[str, Callable[[Path], Any]]:
    """Shards with members that lead elsewhere, or whose headers state what the shard has not."""

    def added(path: Path, content: bytes = b"a", patch: tuple[int, bytes] | None = None, **facts: Any) -> None:
        entry = tarfile.TarInfo(facts.pop("name", "000001.txt"))
        entry.size = len(content)
        for key, value in facts.items():
            setattr(entry, key, value)
        header = entry.tobuf(facts.get("format", tarfile.PAX_FORMAT))
        if patch is not None:
            block = bytearray(header[-512:])
            block[patch[0] : patch[0] + len(patch[1])] = patch[1]
            block[148:156] = b" " * 8
            block[148:156] = f"{sum(block):06o}\0 ".encode()
            header = header[:-512] + bytes(block)
        path.write_bytes(header + content + bytes(-len(content) % 512) + path.read_bytes())

    kinds = {"link": tarfile.SYMTYPE, "hard link": tarfile.LNKTYPE, "device": tarfile.CHRTYPE, "pipe": tarfile.FIFOTYPE}
    names = {"up": "../../../outside/canary.txt", "absolute": f"{absolute(CANARY)}.txt", "no name": "",
             "dots": "...txt", "10,000 letters": "a" * 10_000 + ".txt", "a line end": "a\n/b.txt",
             "a surrogate": "\udcff.txt"}  # fmt: skip
    captions = {
        "deep": b'{"caption":' + b"[" * 10**5, "a mapping": b'{"caption": {"a": 1}}', "a number": b'{"caption": 1}',
        "5,000 digits": b'{"caption": ' + b"9" * 5000 + b"}", "a surrogate": b'{"caption": "\\ud800"}', "a list": b"[]",
        "20 MB": b'{"caption": "' + b"a" * 20 * 2**20 + b'"}', "not UTF-8": b"\xff\xfe", "no text": b'{"caption": ""}',
    }  # fmt: skip
    return {
        **{f"a member that is a {name}": partial(added, content=b"", type=kind, linkname="../../../outside/secret")
           for name, kind in kinds.items()},
        **{f"a member named: {name}": partial(added, name=value) for name, value in names.items()},
        "a size of 2^63": partial(added, patch=(124, b"\x80" + bytes(3) + struct.pack(">Q", 2**63))),
        "a size below zero": partial(added, patch=(124, b"\xff" * 12)),
        "a size that is text": partial(added, patch=(124, b"abcdefghijk\0")),
        "a pax size": partial(added, pax_headers={"size": str(10**18)}),
        "a pax path": partial(added, pax_headers={"path": "../../../outside/canary.txt"}),
        "a long name of 8 GB": partial(added, type=b"L", patch=(124, b"77777777777\0")),
        "10,000 equal keys": lambda path: write_shard(path, [("000000", {"txt": b"a"})] * 10_000),
        "30,000 empty members": lambda path: write_shard(path, [(f"{n}", {"txt": b""}) for n in range(30_000)]),
        **{f"a caption: {name}": partial(lambda path, content: write_shard(
            path, [("0", {"png": picture(0), "json": content, "txt": content}), *numbered(0, 10)]), content=content)
           for name, content in captions.items()},
        **{f"an image: {name}": partial(lambda path, content: write_shard(
            path, [("0", {"png": content, "txt": b"a 1"}), *numbered(0, 10)]), content=content)
           for name, content in images().items()},
    }  # fmt: skip


# Formats.


def command(*words: object) -> None:
    """Run `clipzoo WORDS` in this process; a code other than 0 is raised as SystemExit."""
    sys.argv = ["clipzoo", *map(str, words)]
    main()


EVALUATION = ("eval=demo", "eval.root=sets", "eval.zero_shot=[colours]", "eval.linear_probe=[colours]",
              "eval.prompts=set", "eval.retrieval=[things]")  # fmt: skip


def train(folder: Path, *evaluation: str) -> None:
    """Train a run with an evaluation, or continue it."""
    if not (folder / "sets").exists():
        write_sets(folder / "sets")
        write_numbered(folder / "shards", [10, 10])
    command(
        "train", "encoder=tiny", "data.shards=shards", "data.workers=0", "trainer.global_batch=10", "trainer.steps=2",
        "trainer.epochs=null", "trainer.device=cpu", "trainer.log_every=1", "optim.schedule.warmup_epochs=0",
        "trainer.profile=[1,2]", "name=run", "runs=.", *(evaluation or EVALUATION),
    )  # fmt: skip


def train_only(folder: Path) -> None:
    """Train a run without an evaluation, or continue it."""
    train(folder, "eval=none")


def write_sharded(folder: Path) -> None:
    train(folder, "eval=none", "trainer.checkpoints.format=sharded")


def load_run(folder: Path) -> None:
    clipzoo.load(folder / "run").encode_text("a")


def evaluate(folder: Path) -> None:
    command("evaluate", "run=run", "device=cpu", *EVALUATION)


def write_two_runs(folder: Path) -> None:
    train(folder)
    shutil.copytree(folder / "run", folder / "other")


def read_epoch(shards: str, folder: Path, count: int, **changes: Any) -> None:
    """Read an epoch of `count` numbered samples, of which each is intact, or counted and named in the log."""
    whole = {"crop_scale": (1.0, 1.0), "max_bad_fraction": 0.9, "tokenizer": batch_encoder().tokenizer}
    data = shard_data(shards, **(whole | changes))
    data.open(folder / "log", World())
    order = {"seed": 0, "global_batch": 4, "world": World(), "start_step": 0, "trim_text": True}
    for _ in data.batches(stop_step=-(-data.samples // 4), **order):
        pass
    transform = ImageTransform(8, (1.0, 1.0), "bicubic", 0.0, None, "exact", 10**6)
    images = {caption: image for image, caption in data.examples(range(data.samples))}
    faults = read_json_lines(folder / "log" / "bad_samples.rank0.jsonl", MB)
    for number in range(count):
        image = transform(picture(number), generator("augment", 0, 0, 0))[0]
        if not torch.equal(images.get(f"number {number}", torch.zeros(1)), image):
            named = [fault for fault in faults if fault["key"] in (f"{number:06d}", "")]
            assert data.counters() and named, f"sample {number} is lost, which is neither counted nor named"


def read_shards(folder: Path) -> None:
    shards = f"{folder}/shards/{{00000..00001}}.tar"
    command("shards", "look", shards, "--on", "local:1")
    read_epoch(shards, folder, 20)
    captions = open_validation(shards, None, None).captions
    if not {f"number {number}" for number in range(20)} <= set(captions):
        assert "eval.validation" in sys.stderr.getvalue(), "the validation does not name the samples that it lacks"


def write_indexed_shards(folder: Path) -> None:
    write_numbered(folder / "shards", [10, 10])
    read_shards(folder)


def copied_shards(folder: Path) -> None:
    """Read shards of a store, whose copies are in `cache`."""
    files = fsspec.filesystem("memory")
    shards = write_numbered(folder / "intact", [10])
    files.pipe("/hostile/00000.tar", (shards / "00000.tar").read_bytes())
    read_epoch("memory://hostile/00000.tar", folder, 10, cache_folder=str(folder / "cache"))


def write_search_index(folder: Path) -> None:
    write_images(folder)
    model = loaded("clip")
    clipzoo.export(model, folder / "model", "hub")
    clipzoo.build_index(model, "model", "images", folder / "index")


def search(folder: Path) -> None:
    command("search", "a red circle", "--index", folder / "index", "--count", 3)


def write_images(folder: Path) -> None:
    for number in range(6):
        place = folder / "images" / ("cat" if number % 2 else "dog")
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.png").write_bytes(picture(number))
        (place / f"{number}.txt").write_text(f"number {number}\n")


def read_images(folder: Path) -> None:
    command("shards", "make", folder / "images", folder / "shards")
    command("datasets", "make", folder / "images", folder / "classes", "--processes", 1)
    command("datasets", "make", folder / "images", folder / "captions", "--captions", "--processes", 1)


def write_table(folder: Path, suffix: str) -> None:
    write_images(folder)
    rows = [["filepath", "title", "label", "split"]]
    rows += [
        [f"images/{('dog', 'cat')[n % 2]}/{n}.png", f"number {n}", ("dog", "cat")[n % 2], "test"] for n in range(6)
    ]
    (folder / f"table{suffix}").write_text(FORMATS_OF_TEXT[suffix][1](rows))


def read_table(folder: Path) -> None:
    table = next(folder.glob("table*"), folder / "table.csv")
    command("shards", "make", table, folder / "shards")
    command("datasets", "make", table, folder / "classes", "--label", "label", "--split", "split", "--processes", 1)
    command("datasets", "make", table, folder / "captions", "--caption", "title", "--processes", 1)


def write_karpathy(folder: Path) -> None:
    write_images(folder)
    entries = [
        {"filepath": "images/dog", "filename": f"{n}.png", "split": "train", "sentences": [{"raw": f"number {n}"}] * 5}
        for n in (0, 2, 4)
    ]
    (folder / "dataset_coco.json").write_text(json.dumps({"images": entries, "dataset": "coco"}))


def read_karpathy(folder: Path) -> None:
    with suppress(FileNotFoundError):  # of an image: `open_benchmark` makes it a message
        karpathy(folder, {"split": "train", "captions": 5})
    command("shards", "make", folder / "dataset_coco.json", folder / "shards", "--images", folder)


def write_evaluation_sets(folder: Path) -> None:
    write_sets(folder / "sets")


def read_sets(folder: Path) -> None:
    for name in ("colours", "things"):
        dataset = open_benchmark(name, folder / "sets", "slip")
        splits = [dataset.images] if isinstance(dataset, RetrievalDataset) else list(dataset.splits.values())
        for split in splits:
            for number in range(len(split)):
                split[number]


def write_journal(folder: Path) -> None:
    searches.complete(searches.study(folder / "study", trials=4))


def read_journal(folder: Path) -> None:
    study = searches.study(folder / "study", trials=6)
    study.trials()
    study.claim()
    study.release()


LAB = Path(clipzoo.__file__).parents[1] / "conf" / "lab" / "default.yaml"


def write_lab(folder: Path) -> None:
    shutil.copy(LAB, folder / "lab.yaml")


def read_lab(folder: Path) -> None:
    settings = read_settings(str(folder / "lab.yaml")).chosen([], [], 1)
    cells(settings, folder / "out")


def write_lab_records(folder: Path) -> None:
    (folder / "lab").mkdir()
    write_records(folder / "lab")


def read_lab_records(folder: Path) -> None:
    write_page(folder / "lab", None, "clipzoo lab")


def cache_features(folder: Path) -> None:
    batch = Batch(torch.arange(12).view(4, 3), torch.arange(4).view(4, 1), torch.arange(4))
    cache = FeatureCache(folder / "cache", "text", SimpleNamespace(samples=4), 1.0, None, print, "tune.text")
    for _ in range(2):
        cache(batch, lambda part: Features(part.text.double()))


def write_model(folder: Path, to: str) -> None:
    clipzoo.export(loaded("clip"), folder / "model", to)


def read_model(folder: Path, to: str) -> None:
    if to == "hub":
        clipzoo.load(folder / "model").encode_text("a")
    elif to == "open_clip":
        clipzoo.from_open_clip(f"local-dir:{folder / 'model'}")
    else:
        clipzoo.from_transformers(folder / "model")


def write_stored(folder: Path) -> None:
    train_only(folder)
    lock = {"id": "a", "owner": "process 1 on a", "beat": 3, "released": True}
    (folder / "writer.json").write_text(json.dumps(lock))
    report_of_store(folder)


def report_of_store(folder: Path) -> None:
    """Put the run and its lock into a store, fetch and report it; further names of files are in names.json."""
    files = fsspec.filesystem("memory")
    if files.exists("/hostile"):
        files.rm("/hostile", recursive=True)
    for path in sorted((folder / "run").rglob("*")):
        if path.is_file() and path.stat().st_size < 10**8 and not path.is_symlink():
            files.pipe(f"/hostile/runs/run/{path.relative_to(folder / 'run')}", path.read_bytes())
    if (lock := folder / "writer.json").is_file():
        files.pipe("/hostile/runs/run/.writer-000001.json", lock.read_bytes())
    names = folder / "names.json"
    for name in json.loads(names.read_text()) if names.exists() else ():
        files.store[f"/hostile/runs/{name}"] = files.store["/hostile/runs/run/config.yaml"]
    os.environ["CLIPZOO_STAGING"] = str(folder / "staging")
    command("report", "memory://hostile/runs/run")
    command("report", "memory://hostile/runs")


NAMES = ("run/../../../outside/evil", "run//outside", "../../evil.json", "run/.hidden", "run/a\nb.json", "/evil",
         "run/checkpoints/step_00000009.json/x", "run/" + "a" * 300, "run/report/../../evil", "..", "run/.remote.json",
         "run/\udcff.json", "run/results.json/..")  # fmt: skip


def names_in_a_store() -> dict[str, Damage]:
    return {f"a name: {name[:40]!r}": lambda path, name=name: Path("names.json").write_text(json.dumps([name]))
            for name in NAMES}  # fmt: skip


def write_study(folder: Path) -> None:
    command(
        "studies", "study=rates", "folder=studies", "study.population=200", "study.points=[1,4,16]",
        "study.point_draws=400", "study.features=[16,64]", "study.feature_draws=400", "study.rate_tolerance=0.05",
        "study.size_tolerance=0.1",
    )  # fmt: skip


def page_of_studies(folder: Path) -> None:
    studies.write_page(folder / "studies", ["rates"])


@dataclass(frozen=True)
class Format:
    """A format of files.

    write: makes intact files in a folder. files: patterns of those to damage. read: what a user does with the folder.
    more: further damages of the first file, by name.
    """

    write: Callable[[Path], Any]
    files: tuple[str, ...]
    read: Callable[[Path], Any]
    more: Callable[[], dict[str, Damage]] = field(default=dict)

    @property
    def write_once(self) -> str:
        """Name of the folder of the intact files, which formats with the same `write` share."""
        return getattr(self.write, "__name__", "") or "_".join(map(str, self.write.keywords.values())).strip(".")


RUN = ("run/config.yaml", "run/results.json", "run/metrics.jsonl")
FORMATS: dict[str, Format] = {
    "run, reported": Format(train, (*RUN, "run/*.json", "run/**/*.json", "run/**/*.npz", "run/*.jsonl"),
                            lambda folder: command("report", folder / "run")),
    "runs, compared": Format(write_two_runs, (*RUN, "run/**/*.npz"), lambda folder: command(
        "compare", folder / "run", folder / "other", "--output", folder / "page")),
    "run, evaluated": Format(train, ("run/config.yaml", "run/evaluation/**/*"), evaluate),
    "run, continued": Format(train_only, (*RUN, "run/**/*.json"), train_only),
    "run in a store": Format(
        write_stored, (*RUN, "writer.json", "staging/*/run/.remote.json", "staging/*/run/results.json"),
        report_of_store, names_in_a_store),
    "sharded checkpoint": Format(
        write_sharded, ("run/checkpoints/*/*.json", "run/checkpoints/*/*.safetensors", "run/checkpoints/*.json"),
        load_run),
    "results of a study": Format(write_study, ("studies/rates/result.json",), page_of_studies),
    "shards": Format(write_indexed_shards, ("shards/*.tar",), read_shards, tar_headers),
    "index of shards": Format(write_indexed_shards, ("shards/clipzoo_index/*",), read_shards),
    "copies of shards": Format(copied_shards, ("cache/*.tar",), copied_shards),
    "search index": Format(write_search_index, ("index/*.json", "index/blocks/*"), search),
    "images": Format(write_images, ("images/*/*.png", "images/*/*.txt"), read_images, lambda: {
        name: partial(Path.write_bytes, data=content) for name, content in images().items()}),
    "CSV": Format(partial(write_table, suffix=".csv"), ("table.csv",), read_table),
    "TSV": Format(partial(write_table, suffix=".tsv"), ("table.tsv",), read_table),
    "Karpathy's splits": Format(write_karpathy, ("dataset_coco.json",), read_karpathy),
    "evaluation datasets": Format(write_evaluation_sets, ("sets/**/*.tar", "sets/**/*"), read_sets),
    "journal of a search": Format(write_journal, ("study/journal.log", "study/search.json"), read_journal),
    "lab": Format(write_lab, ("lab.yaml",), read_lab),
    "records of a lab": Format(write_lab_records, ("lab/lab.json", "lab/CLIP/seed-1/results.json"), read_lab_records),
    "cache of features": Format(cache_features, ("cache/*",), cache_features),
    **{f"model of {to}": Format(
        partial(write_model, to=to), ("model/*.json", "model/*.txt"), partial(read_model, to=to))
       for to in ("hub", "open_clip", "transformers")},
}  # fmt: skip


def cases(form: Format, intact: Path) -> list[tuple[str, str, Damage]]:
    """Return the name, the file and the damage of every case of a format, in a fixed random order."""
    files = dict.fromkeys(path for pattern in form.files for path in sorted(intact.glob(pattern)) if path.is_file())
    found: list[tuple[str, str, Damage]] = []
    draw = random.Random(0)
    for number, path in enumerate(files):
        file = str(path.relative_to(intact))
        listed = {**damages(), **(form.more() if number == 0 else {})}
        if path.suffix in FORMATS_OF_TEXT:
            tree = FORMATS_OF_TEXT[path.suffix][0](path.read_text())
            where = sorted(places(tree), key=str) or [()]
            for name, value in values().items():
                for place in draw.sample(where, min(2, len(where))):
                    if place:
                        listed[f"{'.'.join(map(str, place))} is {name}"] = partial(changed, place=place, value=value)
        found += [(f"{file}: {name}", file, damage) for name, damage in listed.items()]
    draw.shuffle(found)
    return found


def snapshot(*folders: Path) -> dict[str, tuple[int, int, int]]:
    """Return mode, size and time of modification of all files in some folders."""
    paths = [path for folder in folders for path in (folder, *folder.rglob("*"))]
    return {str(path): ((own := path.lstat()).st_mode, own.st_size, own.st_mtime_ns) for path in paths}


def run_cases(name: str, most: int, root: Path) -> list[str]:
    """Read the first `most` cases of a format, and return those that did harm or ended in no message."""
    form, faults = FORMATS[name], []
    intact, outside, temporary = root / form.write_once, root / "outside", root / "temporary"
    for folder in (outside, temporary):
        folder.mkdir(parents=True, exist_ok=True)
    (outside / "secret").write_text("secret")
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    if not intact.exists():
        intact.mkdir()
        os.chdir(intact)
        form.write(intact)
    for case, file, damage in [(INTACT, ".", str), *cases(form, intact)[:most]]:
        folder = root / "case"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(intact, folder)
        os.chdir(folder)
        damage(Path(file))
        before = snapshot(outside, intact)
        print(f"{name}: {case}", file=sys.__stderr__, flush=True)
        begun = time.perf_counter()
        fault = outcome(form, folder, case == INTACT)
        print(f"{time.perf_counter() - begun:.1f} s", file=sys.__stderr__, flush=True)
        if snapshot(outside, intact) != before:
            fault += " changed files outside of its folder"
        if left := [path.name for path in temporary.glob("clipzoo-error*")]:
            fault += f" left {left}"
            for path in temporary.glob("clipzoo-error*"):
                fault += path.read_text()
                path.unlink()
        (outside / "canary").unlink(missing_ok=True)
        if fault:
            faults.append(f"{name}: {case}: {fault}")
    return faults


def outcome(form: Format, folder: Path, intact: bool) -> str:
    """Read a case, and return what is wrong with its end; empty if it succeeds or, damaged, ends in one message."""

    class TooLongError(BaseException):
        """No error of a file, which a reader would catch."""

    def stop(*signal: object) -> None:
        raise TooLongError(f"takes longer than {SECONDS} s, or waits")

    output, fault = io.StringIO(), ""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    # A call of C that does not return ends the process.
    faulthandler.dump_traceback_later(SECONDS + 20, exit=True, file=sys.__stderr__)
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        with redirect_stdout(output), redirect_stderr(output):
            form.read(folder)
    except SystemExit as end:
        if end.code not in ((0, 1, 2, os.EX_IOERR) if not intact else (0, None)):
            fault = f"ended with code {end.code}: {output.getvalue()[-500:]}"
    except PartError as error:
        fault = f"a traceback: {error}"
    except (ConfigError, TrainingError) as error:
        fault = f"refused: {error}" if intact else ""
    except BaseException as error:
        fault = "".join(traceback.format_exception(error)[-4:])
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
    if memory("VmHWM") - before > BYTES:
        fault += f" took {(memory('VmHWM') - before) / 1e9:.1f} GB"
    if "Traceback" in output.getvalue() or "(traceback:" in output.getvalue():
        fault += output.getvalue()[-1500:]
    return fault


def memory(field: str) -> int:
    """Return a field of this process's memory in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024
