"""Write docs/papers/reproduce.md: the cost of each of the papers' tables and the commands of its rows.

python -m clipzoo.cli.reproduce_page
"""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from clipzoo.cli.reproduce_demo import ROWS
from clipzoo.config.groups import CONF
from clipzoo.io import write_whole
from clipzoo.io.text import markdown_code, markdown_text
from clipzoo.report.paper_tables.experiments import Experiment, axes, experiments, total_cost
from clipzoo.report.paper_tables.published import PaperTable, layout, search_of, table, table_names
from clipzoo.report.render import markdown_page
from clipzoo.report.table import Cell, text_table

PAGE = CONF.parent / "docs" / "papers" / "reproduce.md"


def page() -> str:
    """Text of docs/papers/reproduce.md."""
    millions = {name: (low / 1e6, high / 1e6) for name, (low, high) in layout()["pairs"].items()}
    tables = [_table_row(table(name)) for name in table_names()]
    rows = [_experiment_row(experiment) for experiment in experiments().values()]
    return markdown_page(
        "reproduce.md.j2",
        demo_rows=ROWS,
        pairs=", ".join(f"{name} {low:g} to {high:g} million" for name, (low, high) in millions.items()),
        searches=list(_searches()),
        total=total_cost(experiments().values()),
        tables=text_table(["table", "title", "pretraining", "rows", "demo", "GPU hours", "report"], tables, left=3),
        rows=text_table(["row", "command", "GPU hours"], rows, left=2),
        without=layout()["without_experiment"],
    )


def _searches() -> Iterator[Markup]:
    for name, facts in layout()["searches"].items():
        search = search_of(facts["rows"][0])
        assert search is not None
        keys = ", ".join(f"{markdown_code(key)} in {values}" for key, values in axes(name).items())
        yield Markup(f"{markdown_code(f'search={name}')}: {keys}. Selected by {markdown_text(search.by)}.")


def _table_row(paper_table: PaperTable) -> list[str | Cell]:
    rows = list(dict.fromkeys(row.name for row in paper_table.rows))
    known = [experiments()[row] for row in rows if row in experiments()]
    title = paper_table.title + ("" if paper_table.without_numbers is None else " (published numbers missing)")
    datasets = ", ".join(dict.fromkeys(row.pretrain for row in paper_table.rows))
    count = f"{len(known)}" if len(known) == len(rows) else f"{len(known)} of {len(rows)}"
    demo = sum(row in ROWS for row in rows)
    command = Cell(f"--table {paper_table.name}", code=True)
    return [paper_table.name, title, datasets, count, str(demo or ""), total_cost(known), command]


def _experiment_row(experiment: Experiment) -> list[str | Cell]:
    runs = f"{experiment.runs} x " if experiment.runs > 1 else ""
    return [experiment.row, Cell(experiment.command, code=True), f"{runs}{experiment.hours:g} {experiment.device}"]


if __name__ == "__main__":
    write_whole(PAGE, page())
