"""Write the report of a run, or the papers' tables with the runs of a folder beside them.

python scripts/report.py runs/demo                     runs/demo/report.md
python scripts/report.py runs                          runs/report/index.html, tables.md, tables.csv, tables.tex
python scripts/report.py runs --table wpse/1 --table kme/3 --output pages
python scripts/report.py --list                        the tables
"""

from __future__ import annotations

import argparse
from pathlib import Path

from clipzoo.errors import explained


def main() -> None:
    options = _options()
    if options.list:
        from clipzoo.report.paper_tables.published import table, table_names

        print("\n".join(f"{name:<14} {table(name).heading}" for name in table_names()))
    elif _is_run(options.folder) and not options.table:
        from clipzoo.report.run_page.page import write_report

        print(write_report(options.folder))
    else:
        from clipzoo.report.paper_tables.pages import write_pages

        print(write_pages(options.folder, options.table, options.output or options.folder / "report", options.note))


def _is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists() or (folder / "results.json").exists()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="a run, or a folder of runs")
    parser.add_argument("--table", action="append", default=[], metavar="NAME", help="only this table; may be repeated")
    parser.add_argument("--output", type=Path, help="where the tables go (default: <folder>/report)")
    parser.add_argument("--note", metavar="TEXT", help="a paragraph for the head of the tables' page")
    parser.add_argument("--list", action="store_true", help="name the tables and stop")
    options = parser.parse_args()
    if options.folder is None and not options.list:
        parser.error("give the folder of a run, or of runs: python scripts/report.py runs/demo")
    return options


if __name__ == "__main__":
    with explained():
        main()
