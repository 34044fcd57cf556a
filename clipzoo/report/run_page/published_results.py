"""A model's results on all datasets beside the published numbers of its row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from clipzoo.report.paper_tables.published import HEADINGS, Metrics, PaperColumn, PaperNumber, table, table_names
from clipzoo.report.run_page.results_tables import CUTOFFS, DIRECTIONS, measurement
from clipzoo.report.table import Table, capitalised, text_table
from clipzoo.runs.metric_key import MetricKey

TASKS = ("zero_shot", "linear_probe", "retrieval")


@dataclass(frozen=True)
class Line:
    """A column of the row in a paper's table, or a metric that no paper prints for the row.

    source: the paper's table, "wpse/1".
    """

    column: PaperColumn
    published: PaperNumber | None
    source: str


def result_tables(metrics: Metrics, missing: Mapping[str, str], row: str | None) -> list[Table]:
    """A table per task: the metric that papers report on each dataset, the published number, the difference.

    Args:
        metrics: in percent.
        missing: reasons why datasets were not evaluated, by name.
        row: "<paper>/<pretraining dataset>/<model>"; None to leave the published numbers out.

    Returns titled tables; none if no dataset belongs to a paper, as on the generated world.
    """
    lines = _lines({key: value for key, value in metrics.items() if key.task in TASKS}, missing, row)
    tables = []
    for heading in dict.fromkeys(line.column.heading for line in lines):
        part = [line for line in lines if line.column.heading == heading]
        labels = ["dataset", "ours"]
        if any(line.published for line in part):
            labels += ["paper", "difference", "table"]
        cells = [_cells(line, metrics, missing)[: len(labels)] for line in part]
        tables.append(text_table(labels, cells, left=1, title=capitalised(heading)))
    return tables


def _lines(metrics: Metrics, missing: Mapping[str, str], row: str | None) -> list[Line]:
    """The paper's columns first, then other measured metrics and missing datasets; ordered by task."""
    from clipzoo.evaluation.datasets.dataset import catalogue

    if not missing and not {key.dataset for key in metrics} & set(catalogue()):
        return []
    lines = list(_published(row)) if row else []
    shown = {key for line in lines if len(line.column.groups or ()) == 1 for key in line.column.keys}
    # A missing dataset with a published number has its line already.
    absent = {name for name in missing if any(name in _datasets(line.column) for line in lines)}
    for column in _measured(metrics, missing):
        if not shown.intersection(column.keys) and not absent.intersection(_datasets(column)):
            lines.append(Line(column, None, ""))
    order = list(HEADINGS.values())
    return sorted(lines, key=lambda line: order.index(line.column.heading))


def _published(row: str) -> Iterator[Line]:
    """All published numbers of the row, each column once."""
    by_column: dict[PaperColumn, Line] = {}
    for name in table_names():
        for (paper_row, column), number in table(name).numbers.items():
            if paper_row.name == row and not column.is_cost and column.groups:
                by_column.setdefault(column, Line(column, number, name))
    yield from by_column.values()


def _measured(metrics: Metrics, missing: Mapping[str, str]) -> Iterator[PaperColumn]:
    """For each dataset the metric that papers report; top-1 and recalls for a dataset of no paper."""
    from clipzoo.evaluation.datasets.dataset import catalogue

    datasets = dict.fromkeys([*((key.dataset, key.paired) for key in metrics), *((name, False) for name in missing)])
    for name, paired in datasets:
        facts = catalogue().get(name, {})
        label = facts.get("title", name.replace("_", " "))
        metric = facts.get("metric", "top1")
        columns = {
            "zero-shot": MetricKey("zero_shot", name, "", metric),
            "linear probe before projection": MetricKey("linear_probe", name, "before", metric),
            "linear probe after projection": MetricKey("linear_probe", name, "after", metric),
        }
        for heading, key in columns.items():
            if key in metrics or (name in missing and "metric" in facts):
                yield PaperColumn(heading, label, ((key,),))
        prefix, protocol = ("paired_", "paired") if paired else ("", "standard")
        for direction in DIRECTIONS:
            for cut in CUTOFFS:
                key = MetricKey("retrieval", name, f"{prefix}{direction}", f"recall_at_{cut}")
                if key in metrics or (name in missing and "captions" in facts):
                    yield PaperColumn(direction.replace("_", " "), f"{label} @{cut}, {protocol}", ((key,),))


def _datasets(column: PaperColumn) -> set[str]:
    return {key.dataset for key in column.keys}


def _cells(line: Line, metrics: Metrics, missing: Mapping[str, str]) -> list[str]:
    column, number = line.column, line.published
    value = column.value(metrics)
    ours = "" if value is None else f"{value:.2f}"
    if value is not None and len(column.keys) == 1:
        ours = measurement(metrics, column.keys[0])
    if value is None and len(_datasets(column)) == 1 and _datasets(column) <= set(missing):
        ours = "missing"
    if number is None:
        return [column.label, ours, "", "", line.source]
    printed = number.printed + (f" ± {number.deviation:g}" if number.deviation is not None else "")
    difference = "" if value is None else f"{value - number.value:+.2f}"
    return [column.label, ours, printed, difference, line.source]
