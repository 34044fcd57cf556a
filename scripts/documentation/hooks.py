"""Hooks of MkDocs: generated pages, links of the changelog, formulas as MathML. See .mkdocs.yml."""

from __future__ import annotations

import argparse
import re
from html import escape, unescape
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

from clipzoo.cli import __main__ as commands
from clipzoo.cli.migrate import TABLE

ROOT = Path(__file__).parents[2]
WEIGHTS = {
    "configuration": 1000, "reference/messages": 6, "reference": 4, "how_to": 3, "getting_started": 3, "concepts": 2,
    "papers": 0.5, "lab": 0.5, "benchmarks": 0.3, "studies": 0.3, "results": 0.3, "changelog": 0.1,
}  # fmt: skip
"""Weight of a page's hits in the search by the start of its address, 1 otherwise: answers before measurements.

A word in a title weighs 1,000 times as much as in a text. The keys of the configuration are text, hence their page's
weight.
"""
REMARKS = {"same": "Not needed: ", "none": "No counterpart: ", "differs": "Differs: ", "absent": "Without it: "}
"""Remarks about a flag in migrate.yaml and how they begin."""
FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])\s*</\1>', re.DOTALL)


def on_files(files: Files, config) -> Files:
    """Add the changelog and the page of all commands."""
    changelog = (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")
    for place, text in {"changelog.md": changelog, "reference/commands.md": _commands()}.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Weight the page in the search; fill `<!-- rows PAPER -->`, `<!-- deviations WORD ... -->` and `<!-- flags X -->`.

    The first two become the table rows of the pages that list all.
    """
    weights = (weight for start, weight in WEIGHTS.items() if page.file.src_uri.startswith(start))
    page.meta.setdefault("search", {"boost": next(weights, 1)})
    markdown = re.sub(r"<!-- rows (\w+) -->", lambda match: _rows("reproduce", (f"{match[1]}/",)), markdown)
    markdown = re.sub(r"<!-- flags (\w+) -->", lambda match: _flags(match[1]), markdown)
    pattern = r"<!-- deviations ([\w -]+) -->"
    return re.sub(pattern, lambda match: _rows("deviations", tuple(match[1].split())), markdown)


def _flags(program: str) -> str:
    """Return the table of a program's flags, of clipzoo/cli/migrate.yaml."""
    lines = ["| flag | overrides | remark |", "| --- | --- | --- |"]
    for flag, entry in TABLE[program].items():
        computed = [key for key, flags in TABLE["overrides"][program].items() if flag in flags]
        overrides = [f"`{text.replace('{}', 'VALUE')}`" for text in entry.get("becomes", "").split()]
        overrides += [f"*{re.sub('={.*', '', key)}*" for key in computed]
        version = {"main": ["Only in main."], "3.3": ["Only in 3.3.0."]}.get(entry.get("only", ""), [])
        remarks = [f"{word}{entry[key]}." for key, word in REMARKS.items() if key in entry]
        lines.append(f"| `--{flag}` | {', '.join(overrides)} | {' '.join([*version, *remarks])} |")
    return "\n".join(lines)


def _rows(name: str, words: tuple[str, ...]) -> str:
    """Return the tables of docs/papers/<name>.md, with the rows whose first cell has one of the words."""
    tables: list[list[str]] = []
    lines = (ROOT / "docs" / "papers" / f"{name}.md").read_text().splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("| ") and following.startswith("| ---"):
            tables.append([line])
        elif line.startswith("| ---") or line.startswith("| ") and any(word in line.split("|")[1] for word in words):
            tables[-1].append(line)
    return "\n\n".join("\n".join(table) for table in tables if len(table) > 2)


def on_page_content(html: str, page, config, files) -> str:
    """Write formulas as MathML, which browsers draw without a script."""

    def formula(match: re.Match[str]) -> str:
        source = unescape(match[2]).strip()
        drawn = convert(source, display="block" if match[1] == "div" else "inline")
        label = escape(re.sub(r"\s+", " ", source), quote=True)
        return drawn.replace("<math ", f'<math aria-label="{label}" ', 1)

    return FORMULA.sub(formula, html)


def _commands() -> str:
    """Return a page with the help of every command, as `clipzoo COMMAND --help` prints it."""
    lines = [
        "# Commands", "",
        "`clipzoo COMMAND --help` prints the same on the terminal. Commands that take `KEY=VALUE` accept every key of",
        "the [configuration](../configuration.md). From a checkout: `python -m clipzoo.cli COMMAND`.", "",
    ]  # fmt: skip
    lines += ["| command | purpose |", "| --- | --- |"]
    parser = commands._parser()
    (action,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for choice in action._choices_actions:
        lines.append(f"| [`clipzoo {choice.dest}`](#clipzoo-{choice.dest}) | {choice.help} |")
    for name, command in action.choices.items():
        lines += ["", f"## `clipzoo {name}`", "", *_help(command)]
    lines += ["", "## Exit codes", "", EXIT_CODES]
    return "\n".join(lines) + "\n"


def _help(parser: argparse.ArgumentParser) -> list[str]:
    """Return the help of a command, with that of its subcommands."""
    lines = ["```text", *parser.format_help().rstrip().splitlines(), "```"]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                lines += ["", f"### `{parser.prog} {name}`", "", *_help(command)]
    return lines


EXIT_CODES = """| code | meaning |
| ---: | --- |
| 0 | success, also for a run that is finished already |
| 1 | an error while the command ran; of `clipzoo doctor`: something is broken |
| 2 | a mistake in the command or its configuration; nothing was started |
| 74 | a file could not be written, such as on a full disk; the same command resumes once there is space |
| 75 | stopped on request (SIGTERM, SIGUSR1, Ctrl-C); a checkpoint is saved and the same command resumes |"""
