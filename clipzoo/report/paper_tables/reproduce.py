"""Write docs/reproduce.md: what every table of the papers takes and how its rows are made.

python -m clipzoo.report.paper_tables.reproduce
"""

from __future__ import annotations

from collections.abc import Iterator

from clipzoo.config.groups import CONF
from clipzoo.report.paper_tables.demo_rows import ROWS
from clipzoo.report.paper_tables.experiments import Experiment, axes, experiments
from clipzoo.report.paper_tables.published import Table, layout, search_of, table, table_names
from clipzoo.report.paper_tables.text import aligned

PAGE = CONF.parent / "docs" / "reproduce.md"
TEXT = """\
# The papers' tables

Written by `python -m clipzoo.report.paper_tables.reproduce` from `conf/experiment` and
`clipzoo/report/paper_tables/published`; a test keeps it true.

Every row is an experiment: its file in `conf/experiment/<paper>/` is the paper's recipe, with its command and its cost
at the head. `scripts/report.py` puts finished runs beside the published numbers.

```bash
python train.py experiment=wpse/cc3m_clip                        # a row
python train.py -m experiment=wpse/cc3m_gaussian search=wpse     # a row that is the best of a search
python train.py -m experiment=cloob/cc3m_cloob seed=0,1,2,3,4    # a row that is a mean over seeds
torchrun --nproc-per-node 8 train.py experiment=kme/cc12m_kme trainer.micro_batch=256
python scripts/evaluate.py run=RUN eval=kme output=FOLDER        # a trained run on another paper's sets
python scripts/report.py runs                                    # runs/report/index.html, tables.md, .csv, .tex
python scripts/report.py runs --table wpse/1                     # one table, filled or not
make reproduce-demo                                              # {demo} rows in small, on two CPU cores
```

Data: [data.md](data.md) says how CC3M, CC12M and YFCC15M are fetched (`data.shards=...` where yours lie elsewhere) and
how the evaluation sets get to `data/downstream` (`eval.root=...`). NUCLR's encoders need `pip install 'clipzoo[hf]'`
and are downloaded on first use.

Sweeps with several devices a point run under SLURM: `python train.py -m hydra/launcher=slurm experiment=... search=...`
or `scripts/launch.py`, which wants the searched values themselves (they are listed below) in place of `search=`.

## Three sizes

| | takes | is |
| --- | --- | --- |
| `scale=paper` | see below | the experiment as it stands |
| `scale=small` | one GPU, about an hour | ViT-S/16 on 160 px, thirty epochs of 30 shards of CC3M, one recipe |
| `scale=demo` | a CPU core, minutes | the demo's towers, eight epochs of 10,000 generated scenes, one recipe |

The small ones keep a row's head and objective and what the row changes in them. Their numbers compare methods with each
other, never with the papers.

`make reproduce-demo` trains {demo} rows, one of every method, as many at once as there are cores, judges each
(zero-shot, linear probe, retrieval) and makes their page; stopped, it goes on where it was, and what is finished is
skipped. Where the paper searched a temperature it takes a point of that search. What came out here:
[the page](results/demo/index.html), [its tables](results/demo/tables.md). It took 21 minutes
on two cores, world included, while other jobs ran. WPSE trains there at its paper's rate and on the caption's points:
with the demo's rate, made for unit vectors, both its rows stayed at chance. CLOOB does too, unless it starts slowly, as
in its paper: a rate of 5e-4, reached after 600 of the 1250 steps ([why](benchmarks.md#cloobs-slow-start)).

`scale=small` has not been run: there was no GPU for it. It is composed, checked and built in the tests like the others.

## When a run stands for a row

Its whole resolved configuration must be that of the row's experiment; only the seed, the places of files and what costs
time or memory may differ. The number of training pairs must be in reach of the paper's
({pairs}).
So must what its numbers rest on: prompts, interpolation, and the probe's crop and share of validation.
Everything else is shown as a variant, with what is different, and enters no mean.

Rows that a paper chose from a search are chosen again, from the points that were run, and the report says how many:

{searches}

Seeds are averaged, with their deviation. Where a row and the first row of its pretraining set both have several seeds,
they are compared as CLOOB did: a two-sided unpaired Wilcoxon test at 5 %, which three seeds against three cannot reach.

## Table of tables

GPU hours are those of all runs of the rows, searches and seeds included; rows of several tables count in each. They are
estimates. KME-CLIP's table 7 gives ViT-B/16 on CC3M (CLIP 1604 s an epoch on 2 H100, KME-CLIP 945 s on 8), NUCLR's log
gives ResNet-50 on 256 px (0.55 s a step of 512 on 2 A100); the others follow by pairs, epochs and FLOPs.
All distinct rows together: {total}.

Nothing has been trained at the papers' size here; *demo* counts the rows that `make reproduce-demo` trains in small.

{tables}

Not tables of runs: WPSE 4, KME-CLIP 4 and CLOOB A3 (facts of the recipes and the sets). The toy of CLOOB's appendix A.2
and the figures of "A mathematical perspective on contrastive learning" are small experiments of their own
(`python -m clipzoo.studies`).

## Rows

{rows}

## Rows without an experiment

{without}
"""


def page() -> str:
    pairs = ", ".join(
        f"{name} {low / 1e6:g} to {high / 1e6:g} million" for name, (low, high) in layout()["pairs"].items()
    )
    without = [f"- {row}: {reason}." for row, reason in layout()["without_experiment"].items()]
    tables = [_table_line(table(name)) for name in table_names()]
    head = ("table", "what", "pretraining", "rows", "demo", "GPU hours", "report")
    rows = [_row_line(each) for each in experiments().values()]
    return TEXT.format(
        demo=len(ROWS),
        pairs=pairs,
        searches="\n".join(_searches()),
        total=_hours(list(experiments().values())),
        tables=aligned(head, tables, left=3),
        rows=aligned(("row", "command", "GPU hours"), rows, left=2),
        without="\n".join(without),
    )


def _searches() -> Iterator[str]:
    for name, facts in layout()["searches"].items():
        search = search_of(facts["rows"][0])
        assert search is not None
        keys = ", ".join(f"`{key}` in {values}" for key, values in axes(name).items())
        yield f"- `search={name}`: {keys}. Chosen by {search.by}."


def _table_line(found: Table) -> list[str]:
    rows = list(dict.fromkeys(row.name for row in found.rows))
    known = [experiments()[row] for row in rows if row in experiments()]
    sets = ", ".join(dict.fromkeys(row.pretrain for row in found.rows))
    demo = sum(row in ROWS for row in rows)
    lacking = "" if found.without_numbers is None else " (published numbers missing)"
    command = f"`--table {found.name}`"
    counted = f"{len(known)}" if len(known) == len(rows) else f"{len(known)} of {len(rows)}"
    return [found.name, found.title + lacking, sets, counted, str(demo or ""), _hours(known), command]


def _row_line(experiment: Experiment) -> list[str]:
    runs = f"{experiment.runs} x {experiment.hours:g}" if experiment.runs > 1 else f"{experiment.hours:g}"
    return [experiment.row, f"`{experiment.command}`", f"{runs} {experiment.device}"]


def _hours(found: list[Experiment]) -> str:
    by_device: dict[str, float] = {}
    for each in found:
        by_device[each.device] = by_device.get(each.device, 0.0) + each.hours * each.runs
    return ", ".join(f"{hours:,.0f} {device}" for device, hours in by_device.items())


if __name__ == "__main__":
    PAGE.write_text(page())
