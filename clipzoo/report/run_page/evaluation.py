"""A model's numbers on all sets beside those that a paper prints for its row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from clipzoo.report.paper_tables.published import HEADINGS, Column, Number, table, table_names
from clipzoo.report.run_page.results_tables import table as markdown

COST = HEADINGS["cost"]
TASKS = ("zero_shot/", "linear_probe/", "retrieval/")


@dataclass(frozen=True)
class Line:
    """One printed column of the row, or a metric of ours that the row has no number for."""

    column: Column
    published: Number | None
    source: str


def evaluation_section(metrics: Mapping[str, float], missing: Mapping[str, str], row: str | None) -> str:
    """A table for every task: each set with our number, the paper's for `row`, and the difference.

    metrics: in percent by flat keys. missing: why a set was not evaluated, by its name. row: <paper>/<pretraining
    set>/<model>, or None where there is nothing to compare with. The metric of a set is the one that papers report.
    """
    lines = _lines(metrics, missing, row)
    if not lines:
        return ""
    title = f"## All sets beside {row}, %" if row else "## All sets, %"
    parts = [title]
    for heading in dict.fromkeys(line.column.heading for line in lines):
        some = [line for line in lines if line.column.heading == heading]
        head = ["set", "ours", *(("paper", "difference", "table") if any(each.published for each in some) else ())]
        cells = [_cells(line, metrics, missing)[: len(head)] for line in some]
        parts.append(f"### {heading[0].upper()}{heading[1:]}\n\n" + markdown(head, cells))
    return "\n\n".join(parts)


def _lines(metrics: Mapping[str, float], missing: Mapping[str, str], row: str | None) -> list[Line]:
    """The paper's columns first, then what else was measured or was asked for and is missing.

    None where no set is the papers', as on the generated world: the tables of all metrics say it already.
    """
    from clipzoo.evaluation.datasets.catalogue import catalogue  # imports torch

    metrics = {key: value for key, value in metrics.items() if key.startswith(TASKS)}
    if not metrics and not missing:
        return []
    if not missing and not {key.split("/")[1].removesuffix("_paired") for key in metrics} & set(catalogue()):
        return []
    lines = list(_published(row)) if row else []
    said = {key for line in lines for key in _keys(line.column)}
    # A missing set that the paper has numbers for stands there already.
    absent = {name for name in missing if any(name in _sets(line.column) for line in lines)}
    for column in _measured(metrics, missing):
        if not said.intersection(_keys(column)) and not absent.intersection(_sets(column)):
            lines.append(Line(column, None, ""))
    order = {heading: place for place, heading in enumerate(HEADINGS.values())}
    return sorted(lines, key=lambda line: order[line.column.heading])


def _published(row: str) -> Iterator[Line]:
    """Every number that the papers print for the row, each column once."""
    found: dict[Column, Line] = {}
    for name in table_names():
        for (each, column), number in table(name).numbers.items():
            if each.name == row and column.heading != COST and column.groups:
                found.setdefault(column, Line(column, number, name))
    yield from found.values()


def _measured(metrics: Mapping[str, float], missing: Mapping[str, str]) -> Iterator[Column]:
    """The metric that papers report of every set of the catalogue, and top-1 or recalls of any other."""
    from clipzoo.evaluation.datasets.catalogue import catalogue  # imports torch

    for name in dict.fromkeys([*(key.split("/")[1] for key in metrics), *missing]):
        facts = catalogue().get(name.removesuffix("_paired"), {})
        label = facts.get("title", name.removesuffix("_paired").replace("_", " "))
        metric = facts.get("metric", "top1")
        keys = {"zero-shot": f"zero_shot/{name}/{metric}"}
        for where in ("before", "after"):
            keys[f"linear probe {where} projection"] = f"linear_probe/{name}/{where}/{metric}"
        for heading, key in keys.items():
            if key in metrics or (name in missing and "metric" in facts):
                yield Column(heading, label, ((key,),))
        protocol = "paired" if name.endswith("_paired") else "standard"
        for way in ("image_to_text", "text_to_image"):
            for cut in (1, 5, 10):
                key = f"retrieval/{name}/{way}/recall_at_{cut}"
                if key in metrics or (name in missing and "captions" in facts):
                    yield Column(way.replace("_", " "), f"{label} @{cut}, {protocol}", ((key,),))


def _keys(column: Column) -> list[str]:
    """Of a column that is one metric of ours."""
    return [key for group in column.groups or () for key in group] if len(column.groups or ()) == 1 else []


def _sets(column: Column) -> set[str]:
    return {key.split("/")[1].removesuffix("_paired") for group in column.groups or () for key in group}


def _cells(line: Line, metrics: Mapping[str, float], missing: Mapping[str, str]) -> list[str]:
    column = line.column
    value, deviation = column.value(metrics), column.deviation(metrics)
    ours = "" if value is None else f"{value:.2f}"
    if value is not None and deviation is not None:
        ours += f" ± {deviation:.2f}"
    if value is None and len(_sets(column)) == 1 and _sets(column) <= set(missing):
        ours = "missing"
    published, difference = "", ""
    if line.published is not None:
        published = line.published.printed
        if line.published.deviation is not None:
            published += f" ± {line.published.deviation:g}"
        if value is not None:
            difference = f"{value - line.published.value:+.2f}"
    return [column.label, ours, published, difference, line.source]
