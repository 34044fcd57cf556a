"""List the keys of a run: type, default and meaning, and the options of each group.

clipzoo config                     all of them
clipzoo config tau                 those that contain the word: keys, options, types and meanings are searched
clipzoo config head temperature    those that contain both words
clipzoo config --markdown          the page docs/configuration.md
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from clipzoo.errors import ConfigError, nearest
from clipzoo.io.text import markdown_code, markdown_text

if TYPE_CHECKING:
    from clipzoo.config.listing import Section

INTRODUCTION = """# Configuration

Every key of a training, by group: `clipzoo train GROUP=OPTION KEY=VALUE ...`. On the terminal: `clipzoo config`, and
`clipzoo config WORD` for the keys that contain a word. A default `${a.b}` is the value of the key `a.b`,
`from_model:x` is found in the model, and a key without a default must be given.

This page is written by `clipzoo config --markdown > docs/configuration.md`.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="WORD", help="list only entries that contain all of these words")
    parser.add_argument("--markdown", action="store_true", help="print the page of the documentation")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    # Imports Hydra, which no help and no other command waits for.
    from clipzoo.config.groups import groups, options as options_of
    from clipzoo.config.listing import sections

    found = list(matching(list(sections()), options.words))
    groups = {group: names for group in groups() if (names := options_of(group)) and _holds([group, *names], options.words)}
    if not found and not groups:
        words = [word for section in sections() for entry in section.entries for word in entry.key.split(".")]
        near = nearest(options.words[0], list(dict.fromkeys(words)))
        raise ConfigError(
            f"no key, option or meaning holds {' and '.join(options.words)}{near}; clipzoo config lists all"
        )
    width = min(shutil.get_terminal_size((100, 24)).columns, 140)
    lines = _markdown(groups, found) if options.markdown else _terminal(groups, found, width)
    try:
        print("\n".join(lines).strip(), flush=True)
    except BrokenPipeError:
        # `clipzoo config | head`: nothing is left to be flushed when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def matching(listed: Sequence[Section], words: Sequence[str]) -> Iterator[Section]:
    """Yield the sections with the entries that hold all words; the titles of their sections count as theirs."""
    for section in listed:
        entries = tuple(
            entry
            for entry in section.entries
            if _holds([entry.key, entry.type, entry.meaning, section.title, section.target], words)
        )
        if entries:
            yield replace(section, entries=entries)


def _holds(texts: Sequence[str], words: Sequence[str]) -> bool:
    text = " ".join(texts).lower()
    return all(word.lower() in text for word in words)


def _terminal(groups: dict[str, list[str]], found: Sequence[Section], width: int) -> Iterator[str]:
    for group, names in groups.items():
        yield from textwrap.wrap(f"{group}=" + "|".join(names).replace("|", " | "), width, subsequent_indent="    ")
    for section in found:
        yield ""
        heading = f"{section.title}: {section.summary}" if section.title else section.summary
        yield from textwrap.wrap(heading, width, subsequent_indent="  ", break_on_hyphens=False)
        for entry in section.entries:
            default = f" = {entry.default}" if entry.default else ""
            yield f"  {entry.key}{default}"
            yield from textwrap.wrap(
                f"{entry.type}. {entry.meaning}", width, initial_indent="      ", subsequent_indent="      ",
                break_on_hyphens=False,
            )  # fmt: skip


def _markdown(groups: dict[str, list[str]], found: Sequence[Section]) -> Iterator[str]:
    yield INTRODUCTION
    yield "## Groups\n\n| group | options |\n| --- | --- |"
    for group, names in groups.items():
        yield f"| `{group}` | {', '.join(f'`{name}`' for name in names)} |"
    last = None
    for section in found:
        if section.group != last:
            yield f"\n## {section.group or 'The run'}"
        last = section.group
        if section.title:
            yield f"\n**{markdown_text(section.title)}**: {markdown_text(section.summary)}"
        yield "\n| key | type | default | meaning |\n| --- | --- | --- | --- |"
        for entry in section.entries:
            default = markdown_code(entry.default, in_table=True) if entry.default else ""
            cells = [markdown_code(entry.key), markdown_text(entry.type), default, markdown_text(entry.meaning)]
            yield f"| {' | '.join(cells)} |"
