"""Throughput of tables and an image folder compared with tar shards of the same pictures: only our loader.

    python scripts/benchmark.py tables --output docs/benchmarks/readings/loading/tables.json

All loaders stay alive with one thread per process and read some batches in turn, as in the benchmark `loader`. The
first turn is not counted: it writes the local copies of Parquet and fills the page cache.
"""

from __future__ import annotations

import argparse
import tarfile
from pathlib import Path
from typing import Any

from benchmarks import ROOT, medians, publish
from benchmarks.loader import Loader, photographs
from clipzoo.cli.arguments import Parser, number_in
from clipzoo.config.vocabulary import Count, Workers

SHARED = {"rounds": 10, "batch": 64}


def add_options(parser: Parser) -> None:
    parser.add_argument("--folder", type=Path, default=ROOT / "data" / "benchmark", help="where the pictures are made")
    parser.add_argument("--samples", type=number_in(Count), default=2048, help="pictures, a quarter in each shard")
    parser.add_argument("--row-group", type=number_in(Count), default=256, help="rows of a row group of Parquet")
    parser.add_argument("--workers", type=number_in(Workers), nargs="+", default=[0, 2])
    parser.set_defaults(peer=ROOT)


def main(options: argparse.Namespace) -> None:
    """Print samples per second and per CPU second of every form, and their ratios to tar."""
    forms, rows = write_forms(options), []
    for workers in options.workers:
        loaders = {name: Loader(options, path, 224, workers, "clipzoo", "exact", True) for name, path in forms.items()}
        readings: dict[str, list[dict]] = {name: [] for name in loaders}
        # Batches prepared while other loaders were measured must not count.
        prepared = 2 * workers + 1
        for turn in range(options.rounds + 1):
            for name, loader in loaders.items():
                loader.read(prepared)
                reading = loader.read(max(prepared, options.samples // options.batch // 4))
                loader.read(0)
                if turn:
                    readings[name].append(reading)
        for loader in loaders.values():
            loader.close()
        row: dict[str, Any] = {"workers": workers}
        for key, unit in (("seconds", "samples_per_second"), ("work", "samples_per_work_second")):
            rates = medians({name: [part["samples"] / part[key] for part in parts] for name, parts in readings.items()})
            row |= {unit: rates, f"{unit}_to_tar": {name: rate / rates["tar"] for name, rate in rates.items()}}
        rows.append(row)
    facts = {"samples": options.samples, "row_group": options.row_group, "batch": options.batch}
    publish(options, {"what": "only the loader, 400 x 300 to 224, crop scale 0.5 to 1", **facts, "rows": rows})


def write_forms(options: argparse.Namespace) -> dict[str, str]:
    """Return the same pictures as tars, Parquet, Arrow and a folder of files, written if they are missing."""
    import pyarrow as pa
    from pyarrow import parquet

    tars = Path(photographs(options.folder, 400, 300, options.samples)).parent
    forms = {name: tars.with_name(f"{tars.name}_{name}") for name in ("parquet", "arrow", "folder")}
    for folder in forms.values():
        folder.mkdir(exist_ok=True)
    for shard in sorted(tars.glob("*.tar")):
        with tarfile.open(shard) as archive:
            files = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
        for name, content in files.items():
            (forms["folder"] / name).write_bytes(content)
        keys = sorted({name.partition(".")[0] for name in files})
        columns = {"image": [files[f"{key}.jpg"] for key in keys], "caption": [files[f"{key}.txt"] for key in keys]}
        table = pa.table({"image": columns["image"], "caption": [text.decode() for text in columns["caption"]]})
        parquet.write_table(table, forms["parquet"] / f"{shard.stem}.parquet", row_group_size=options.row_group)
        with pa.ipc.new_file(forms["arrow"] / f"{shard.stem}.arrow", table.schema) as writer:
            writer.write_table(table, options.row_group)
    return {"tar": str(tars), **{name: str(folder) for name, folder in forms.items()}}
