"""Commands that read runs or keys: `clipzoo report`, `clipzoo compare` and `clipzoo config`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

from clipzoo.cli.arguments import output_folder, refuse
from clipzoo.errors import ConfigError, nearest, number_of
from clipzoo.io.text import markdown_code, markdown_text
from clipzoo.runs.remote import local_copy, write_back

INTRODUCTION = """# Configuration

Every key of a training, by group: `clipzoo train GROUP=OPTION KEY=VALUE ...`. On the terminal: `clipzoo config`, and
`clipzoo config WORD` for the keys that contain a word. A default `${a.b}` is the value of the key `a.b`,
`from_model:x` is taken from the model, and a key without a default must be given.

This page is written by `clipzoo config --markdown > docs/configuration.md`.
"""


def report_arguments(parser: argparse.ArgumentParser) -> None:
    """Write the report of a run, compare runs, or show the papers' tables with the runs of a folder.

    clipzoo report runs/demo                     runs/demo/report.md and report.html, one file with its pictures
    clipzoo report runs/a runs/b runs/c          runs/comparison/index.html, tables.md, tables.csv, tables.tex
    clipzoo report runs                          runs/report/index.html, ...: the papers' tables and other runs compared
    clipzoo report runs --table wpse/1 --table kme/3 --output pages
    clipzoo report --list                        the names of the tables
    """
    parser.add_argument("folders", nargs="*", help="run directories, or a folder of them; URLs too", metavar="FOLDER")
    parser.add_argument("--table", action="append", default=[], metavar="NAME", help="only this table; repeatable")
    _add_output(parser, "default: FOLDER/report of one folder, else comparison")
    parser.add_argument("--list", action="store_true", help="print the names of the tables and exit")
    parser.set_defaults(run=report, scaling=())


def report(options: argparse.Namespace) -> None:
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
    locations = options.folders
    options.folders = [local_copy(location, "FOLDER", weights=False) for location in locations]
    if len(locations) == 1 and is_run(options.folders[0]) and not options.table:
        from clipzoo.report.pages import write_report

        why = f"is for several runs or --table: the page of {locations[0]} is in its folder"
        refuse(options, ("--output", "--note"), why)
        print(write_report(options.folders[0]))
    else:
        write_comparison(options, options.folders, options.folders, "report")
    if len(locations) == 1 and options.output is None:
        write_back(locations[0], "FOLDER")


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Compare runs: metrics, paired tests, settings that differ, and samples on which only one is right.

    clipzoo compare runs/a runs/b                runs/comparison/index.html, tables.md, tables.csv, tables.tex
    clipzoo compare runs/a elsewhere/b           comparison/index.html, ..., in the working directory
    clipzoo compare runs/a runs/b runs/c --output pages --note "three heads"
    clipzoo compare runs                         all runs of a folder
    clipzoo compare runs --scaling compute width power laws of loss and errors, checked on the largest scale
    """
    parser.add_argument("folders", nargs="+", help="run directories, or folders of them; URLs too", metavar="FOLDER")
    _add_output(parser, "default: comparison, in the common folder of the runs or here")
    parser.add_argument("--scaling", nargs="+", default=[], metavar="AXIS",
                        help="fit power laws in compute, samples, width or a configuration key")  # fmt: skip
    parser.set_defaults(run=compare, table=())


def _add_output(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--output", type=output_folder, help=default)
    parser.add_argument("--note", metavar="TEXT", help="a paragraph above the tables")


def compare(options: argparse.Namespace) -> None:
    from clipzoo.report.frame import run_folders

    folders = [local_copy(location, "FOLDER", weights=False) for location in options.folders]
    runs = run_folders(folders)
    if len(runs) < 2:
        counted = f"{' '.join(options.folders)} holds {number_of(len(runs), 'run')}"
        raise ConfigError(f"{counted}: give two or more, clipzoo compare runs/a runs/b")
    write_comparison(options, folders, runs, "comparison")


def write_comparison(options: argparse.Namespace, folders: Sequence[Path], runs: Sequence[Path], name: str) -> None:
    """Write the papers' tables, or a comparison of several runs, and print the path of the page.

    It is in --output, in the folder `name` of a single folder, next to runs of one folder, or in the working directory.
    """
    from clipzoo.report.pages import write_pages

    resolved = [run.resolve() for run in runs]
    if repeated := [run for run, place in zip(runs, resolved, strict=True) if resolved.count(place) > 1]:
        raise ConfigError(f"{repeated[0]} is given {resolved.count(repeated[0].resolve())} times: give each run once")
    output = options.output
    if output is None and len(folders) == 1:
        output = folders[0] / name
    elif output is None:
        parents = [folder.resolve().parent for folder in folders]
        common = Path(os.path.commonpath(parents))
        output = (common if common in parents else Path()) / "comparison"
    print(write_pages(runs, options.table, output, options.note, scaling=options.scaling))


def is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists() or (folder / "results.json").exists()


def config_arguments(parser: argparse.ArgumentParser) -> None:
    """List the keys of a run: type, default and meaning, and the options of each group.

    clipzoo config                     all of them
    clipzoo config tau                 those that contain the word: keys, options, types and meanings are searched
    clipzoo config head temperature    those that contain both words
    clipzoo config --markdown          the page docs/configuration.md
    clipzoo config --schema head       JSON Schema of the options of a group; without it of experiments and runs
    """
    parser.add_argument("words", nargs="*", metavar="WORD", help="list only entries that contain all of these words")
    parser.add_argument("--markdown", action="store_true", help="print the page of the documentation")
    parser.add_argument("--schema", nargs="?", const="train.yaml", metavar="GROUP", help="print a JSON Schema")
    parser.set_defaults(run=config)


def config(options: argparse.Namespace) -> None:
    # Imports Hydra, which help and the other commands do not need.
    from clipzoo.config.groups import groups as all_groups, options as options_of
    from clipzoo.config.listing import json_schema, sections

    if options.schema is not None:
        refuse(options, ("--markdown",), "is another form than --schema: give one of the two")
        print(json.dumps(json_schema(options.schema), indent=1))
        return

    def holds_all(texts: Sequence[str]) -> bool:
        text = " ".join(texts).lower()
        return all(word.lower() in text for word in options.words)

    matches = []
    for section in (all_sections := list(sections())):
        # A section's title and class count as words of its entries.
        titles = [section.title, section.target]
        if entries := [part for part in section.entries if holds_all([part.key, part.type, part.meaning, *titles])]:
            matches.append(section._replace(entries=tuple(entries)))
    groups = {group: names for group in all_groups() if (names := options_of(group)) and holds_all([group, *names])}
    if not matches and not groups:
        words = [word for section in all_sections for entry in section.entries for word in entry.key.split(".")]
        near = nearest(options.words[0], list(dict.fromkeys(words)))
        raise ConfigError(f"nothing holds {' and '.join(options.words)}{near}; clipzoo config lists all keys")
    lines = []
    if options.markdown:
        lines += [INTRODUCTION, "## Groups\n\n| group | options |\n| --- | --- |"]
        lines += [f"| `{group}` | {', '.join(f'`{name}`' for name in names)} |" for group, names in groups.items()]
        last_group = None
        for section in matches:
            if section.group != last_group:
                lines.append(f"\n## {section.group or 'The run'}")
            last_group = section.group
            if section.title:
                lines.append(f"\n**{markdown_text(section.title)}**: {markdown_text(section.summary)}")
            lines.append("\n| key | type | default | meaning |\n| --- | --- | --- | --- |")
            for entry in section.entries:
                default = markdown_code(entry.default, in_table=True) if entry.default else ""
                cells = [markdown_code(entry.key), markdown_text(entry.type), default, markdown_text(entry.meaning)]
                lines.append(f"| {' | '.join(cells)} |")
    else:
        width = min(shutil.get_terminal_size((100, 24)).columns, 140)
        for group, names in groups.items():
            lines += textwrap.wrap(f"{group}={' | '.join(names)}", width, subsequent_indent="    ")
        for section in matches:
            heading = f"{section.title}: {section.summary}" if section.title else section.summary
            lines += ["", *textwrap.wrap(heading, width, subsequent_indent="  ", break_on_hyphens=False)]
            for entry in section.entries:
                indent, default = "      ", f" = {entry.default}" if entry.default else ""
                wrap = textwrap.TextWrapper(width, indent, indent, break_on_hyphens=False).wrap
                lines += [f"  {entry.key}{default}", *wrap(f"{entry.type}. {entry.meaning}")]
    print("\n".join(lines).strip(), flush=True)
