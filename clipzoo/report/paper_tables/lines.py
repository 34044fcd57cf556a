"""A filled table as printed lines, for every format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from clipzoo.report.comparison.significance import LEVEL
from clipzoo.report.paper_tables.published import Column, not_measured
from clipzoo.report.paper_tables.tables import Entry, Filled, Group, variant_value

MOST_COLUMNS = 9
Kind = Literal["published", "ours", "difference", "variant"]


@dataclass(frozen=True)
class Line:
    """after, model: of the row, on its first line only. what: "published", "ours, 3 seeds". cells: a column each."""

    kind: Kind
    after: str
    model: str
    what: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Block:
    """Columns that stand side by side, and their lines."""

    heading: str
    labels: tuple[str, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Missing:
    """A row without numbers of ours. command: what makes them; cost: what it takes, or why there is no command."""

    after: str
    model: str
    command: str | None
    cost: str


def blocks(filled: Filled) -> list[Block]:
    """Few columns stand in one block; many are parted by what they measure."""
    columns = filled.table.columns
    headings = list(dict.fromkeys(each.heading for each in columns))
    if len(headings) > 1 and len(columns) <= MOST_COLUMNS:
        labels = tuple(f"{each.heading}: {each.label}" for each in columns)
        return [Block("", labels, tuple(_lines(filled, columns)))]
    parted = [tuple(each for each in columns if each.heading == heading) for heading in headings]
    return [
        Block(heading if len(headings) > 1 else "", tuple(each.label for each in part), tuple(_lines(filled, part)))
        for heading, part in zip(headings, parted, strict=True)
    ]


def missing(filled: Filled) -> list[Missing]:
    """Rows that no run stands for, and rows whose runs were not judged on any of the columns."""
    found = []
    for entry in filled.entries:
        if entry.ours is not None and not _measured(entry.ours, filled.table.columns):
            run, paper = entry.ours.runs[0].run, filled.table.name.split("/")[0]
            how = f"python scripts/evaluate.py run={run.folder} eval={paper}"
            found.append(Missing(entry.row.pretrain, entry.row.model, how, "evaluation of a trained run"))
        if entry.ours is None:
            command, cost = (None, entry.reason or "no experiment")
            if entry.experiment is not None:
                command, cost = entry.experiment.command, hours(entry)
            found.append(Missing(entry.row.pretrain, entry.row.model, command, cost))
    return found


def hours(entry: Entry) -> str:
    """The estimated cost of the row's runs."""
    experiment = entry.experiment
    assert experiment is not None
    runs = f", {experiment.runs} runs" if experiment.runs > 1 else ""
    return f"{experiment.hours * experiment.runs:,.0f} {experiment.device} hours{runs}"


def remarks(filled: Filled) -> list[str]:
    """What has to be said below the table."""
    found = [filled.table.note] if filled.table.note else []
    if filled.table.without_numbers:
        found.append(f"No published numbers: {filled.table.without_numbers}.")
    found += [f"{column.label}, {column.heading}: not measured; {reason}." for column, reason in unmeasured(filled)]
    found += [f"{each.row.pretrain}, {each.row.model}: {each.chosen}." for each in filled.entries if each.chosen]
    found += [
        f"{entry.row.pretrain}, {entry.row.model}: counts runs of {other}, whose configuration is the same."
        for entry in filled.entries
        for other in dict.fromkeys(each.run.row for each in (entry.ours.runs if entry.ours else ()))
        if other != entry.row.name
    ]
    tested = [
        (entry, column, p) for entry in filled.entries for column in filled.table.columns
        if (p := filled.p_value(entry, column)) is not None
    ]  # fmt: skip
    if tested:
        found.append(
            "* differs at 5 % from the baseline of its pretraining set (two-sided unpaired Wilcoxon test over seeds): "
            + "; ".join(f"{e.row.model}, {c.label}: p = {p:.3f}" for e, c, p in tested)
        )
    return found


def unmeasured(filled: Filled) -> Iterator[tuple[Column, str]]:
    """The columns that stay empty, and why."""
    for column in filled.table.columns:
        keys = [key for group in column.groups or () for key in group]
        # Means over many sets stay empty too; the sets' own columns say why.
        if len({"/".join(key.split("/")[:2]) for key in keys}) == 1 and (reason := not_measured(keys[0])):
            yield column, reason


def _lines(filled: Filled, columns: tuple[Column, ...]) -> Iterator[Line]:
    for entry in filled.entries:
        names = iter([(entry.row.pretrain, entry.row.model)])
        published = [filled.number(entry, column) for column in columns]
        cells = tuple(
            "" if each is None else each.printed + (f" ± {each.deviation:.2f}" if each.deviation is not None else "")
            for each in published
        )
        yield Line("published", *next(names, ("", "")), "published", cells)
        if entry.ours and _measured(entry.ours, columns):
            yield Line("ours", "", "", f"ours, {_seeds(entry.ours)}", _ours(filled, entry, columns))
            cells = tuple(_difference(filled, entry, column) for column in columns)
            if any(cells):
                yield Line("difference", "", "", "difference", cells)
        for group in entry.variants:
            found = [(variant_value(group, column), filled.digits(column)) for column in columns]
            cells = tuple(ours.text(digits) if ours else "" for ours, digits in found)
            if any(cells):
                yield Line("variant", "", "", f"variant: {group.label}, {_seeds(group)}", cells)


def _ours(filled: Filled, entry: Entry, columns: tuple[Column, ...]) -> tuple[str, ...]:
    assert entry.ours is not None
    cells = []
    for column in columns:
        ours, p = entry.ours.ours(column), filled.p_value(entry, column)
        marked = "*" if p is not None and p < LEVEL else ""
        cells.append("" if ours is None else ours.text(filled.digits(column)) + marked)
    return tuple(cells)


def _difference(filled: Filled, entry: Entry, column: Column) -> str:
    """Signed; what rounds to nothing has no sign."""
    change, digits = filled.difference(entry, column), filled.digits(column)
    if change is None:
        return ""
    return f"{change:+.{digits}f}" if round(change, digits) else f"{0:.{digits}f}"


def _measured(group: Group, columns: tuple[Column, ...]) -> bool:
    return any(group.ours(column) for column in columns)


def _seeds(group: Group) -> str:
    seeds = sorted({each.run.seed for each in group.runs})
    return f"{len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
