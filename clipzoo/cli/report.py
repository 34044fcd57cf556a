"""Write the report of a run, compare runs, or show the papers' tables with the runs of a folder.

clipzoo report runs/demo                     runs/demo/report.md and report.html, one file with its pictures
clipzoo report runs/a runs/b runs/c          runs/comparison/index.html, tables.md, tables.csv, tables.tex
clipzoo report runs                          runs/report/index.html, ...: the papers' tables, and other runs compared
clipzoo report runs --table wpse/1 --table kme/3 --output pages
clipzoo report --list                        the names of the tables
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from clipzoo.cli.arguments import output_folder, refuse
from clipzoo.errors import ConfigError
from clipzoo.runs.remote import local_copy, write_back


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders", nargs="*", help="run directories, or a folder of them; URLs of a store too", metavar="FOLDER"
    )
    parser.add_argument("--table", action="append", default=[], metavar="NAME", help="only this table; repeatable")
    parser.add_argument(
        "--output",
        type=output_folder,
        help="folder for the page (default: FOLDER/report of one folder, comparison of several)",
    )
    parser.add_argument("--note", metavar="TEXT", help="a paragraph above the tables")
    parser.add_argument("--list", action="store_true", help="print the names of the tables and exit")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    if options.list:
        refuse(options, ("--table", "--output", "--note"), "has no effect with --list")
        if options.folders:
            raise ConfigError("--list names the tables of the papers: give no folder")
        from clipzoo.report.published import table, table_names
        from clipzoo.report.render import terminal, text_table

        print(terminal(text_table(["", ""], [[name, table(name).heading] for name in table_names()], left=2)))
        return
    if not options.folders:
        raise ConfigError("give a run directory, or a folder of run directories: clipzoo report runs/demo")
    given = options.folders
    options.folders = [local_copy(place, "FOLDER", weights=False) for place in given]
    if len(given) == 1 and is_run(options.folders[0]) and not options.table:
        from clipzoo.report.pages import write_report

        refuse(
            options, ("--output", "--note"), f"is for several runs or --table: the page of {given[0]} is in its folder"
        )
        print(write_report(options.folders[0]))
    else:
        write_comparison(options.folders, options.table, options.output, options.note)
    if len(given) == 1 and options.output is None:
        write_back(given[0], "FOLDER")


def write_comparison(
    folders: list[Path], tables: list[str], output: Path | None, note: str | None, scaling: Sequence[str] = ()
) -> None:
    """Write the papers' tables, or a comparison of several runs, and print the path of the page."""
    from clipzoo.report.pages import write_pages

    places = [folder.resolve() for folder in folders]
    for folder, place in zip(folders, places, strict=True):
        if places.count(place) > 1:
            raise ConfigError(f"{folder} is given {places.count(place)} times: give each run once")
    default = folders[0] / "report" if len(folders) == 1 else comparison_folder(folders)
    print(write_pages(folders, tables, output or default, note, scaling=scaling))


def comparison_folder(folders: Sequence[Path]) -> Path:
    """Return the folder of a comparison: beside the runs if one folder holds them, else in the working directory."""
    parents = [folder.resolve().parent for folder in folders]
    common = Path(os.path.commonpath(parents))
    return (common if common in parents else Path()) / "comparison"


def is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists() or (folder / "results.json").exists()
