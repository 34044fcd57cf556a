"""Compare runs: metrics, paired tests, settings that differ, and samples on which only one is right.

clipzoo compare runs/a runs/b                runs/comparison/index.html, tables.md, tables.csv, tables.tex
clipzoo compare runs/a elsewhere/b           comparison/index.html, ..., in the working directory
clipzoo compare runs/a runs/b runs/c --output pages --note "three heads"
clipzoo compare runs                         all runs of a folder
clipzoo compare runs --scaling compute width power laws of loss and errors, checked on the largest scale
"""

from __future__ import annotations

import argparse
from pathlib import Path

from clipzoo.cli.arguments import output_folder
from clipzoo.cli.report import comparison_folder, is_run, write_comparison
from clipzoo.errors import ConfigError, number_of
from clipzoo.runs.remote import local_copy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", help="run directories, or folders of them; URLs too", metavar="FOLDER")
    parser.add_argument(
        "--output", type=output_folder,
        help="folder for the page (default: comparison, in the common folder of the runs or the working directory)",
    )  # fmt: skip
    parser.add_argument("--note", metavar="TEXT", help="a paragraph above the tables")
    parser.add_argument(
        "--scaling", nargs="+", default=[], metavar="AXIS",
        help="fit power laws of loss and errors in compute, samples, width or a configuration key",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    folders = [local_copy(place, "FOLDER", weights=False) for place in options.folders]
    runs = [run for folder in folders for run in ([folder] if is_run(folder) else _runs(folder))]
    if len(runs) < 2:
        given = " ".join(options.folders)
        raise ConfigError(
            f"{given} holds {number_of(len(runs), 'run')}: give two or more, clipzoo compare runs/a runs/b"
        )
    default = folders[0] / "comparison" if len(folders) == 1 else comparison_folder(folders)
    write_comparison(runs, [], options.output or default, options.note, options.scaling)


def _runs(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    return [path.parent for path in sorted(folder.rglob("config.yaml"))]
