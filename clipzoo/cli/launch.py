"""Run a sweep without a resident process: each point is a job of a SLURM array; afterwards, tabulate the points.
With --to, print the file that starts one training on several machines.

clipzoo launch head=wpse head.kernel.width=0.5,0.75,1.0 seed=0,1                        lists the points
clipzoo launch --submit --sbatch '--gpus-per-node=4' head=wpse seed=0,1                  submits slurm/sweep.sbatch
clipzoo launch --point 3 head=wpse head.kernel.width=0.5,0.75,1.0 seed=0,1              trains point 3 here
clipzoo launch --table zero_shot/imagenet/top1 head=wpse head.kernel.width=0.5,0.75,1.0 seed=0,1
clipzoo launch --submit --at-once 8 search.sampler=tpe search.trials=40 ...     submits 8 processes of a search
clipzoo launch search.sampler=tpe search.trials=40 ...                          lists its trials, writes its page
clipzoo launch --to kubernetes --nodes 4 --gpus 8 name=kme runs=/runs experiment=kme/cc12m_kme
                                        prints a file; or torchrun, pytorchjob, skypilot

Points are numbered from 0; the values of the last key change fastest. The table averages over seeds, marks the best
point, and is written to <output> with its plot.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

from clipzoo.cli import trials
from clipzoo.cli.arguments import Parser, number_in, output_folder, own_errors
from clipzoo.cli.recipes import RECIPES, recipe
from clipzoo.config.compose import compose
from clipzoo.config.groups import CONF
from clipzoo.config.vocabulary import Count, NonNegativeCount
from clipzoo.errors import ConfigError, TrainingError
from clipzoo.io import write_whole
from clipzoo.runs import sweep
from clipzoo.runs.directory import is_finished
from clipzoo.runs.search.settings import Search
from clipzoo.runs.search.space import Space
from clipzoo.runs.search.study import Study, study_folder

SWEEP_SCRIPT, SEARCH_SCRIPT = (Path("slurm") / f"{name}.sbatch" for name in ("sweep", "search"))


def main(arguments: list[str]) -> None:
    options = _options(arguments)
    with own_errors(options):
        _launch(options)


def _launch(options: argparse.Namespace) -> None:
    if (search := trials.search_of(options.overrides)) is not None:
        _launch_search(options, *search)
        return
    if options.to is not None:
        print(recipe(options), end="")
        return
    points = sweep.points(options.overrides)
    if options.point is not None:
        train(points, options.point, options.overrides)
    elif options.submit:
        submit(points, options)
    elif options.table:
        show(points, options)
    else:
        for number, point in enumerate(points):
            values = "  ".join(f"{key}={value}" for key, value in point.swept.items())
            state = "finished" if is_finished(point.folder) else ""
            print(f"{number:4}  {values}  {point.folder}  {state}".rstrip())


def _launch_search(options: argparse.Namespace, search: Search, space: Space) -> None:
    """Submit processes that draw trials of a search, or show its trials until now."""
    if options.point is not None or options.table:
        raise ConfigError("a search draws its points: clipzoo train -m ... trains them, and launch without --point and "
                          "--table shows them")  # fmt: skip
    for line in space.corner_lines():
        compose(line)
    study = Study(study_folder(search, space), search, space)
    if options.submit:
        _sbatch(SEARCH_SCRIPT, f"0-{(options.at_once or 1) - 1}", options)
    elif study.folder.exists():
        trials.show(study)
    else:
        print("no trial of the search has been drawn: clipzoo train -m ... begins it")


def train(points: list[sweep.Point], number: int, overrides: list[str]) -> None:
    """Replace this process by the training of one point."""
    if not 0 <= number < len(points):
        raise ConfigError(f"--point {number}: the sweep has points 0 to {len(points) - 1}")
    os.environ["CLIPZOO_SWEEP"] = sweep.sweep_name(overrides)
    os.execv(sys.executable, [sys.executable, "-m", "clipzoo.cli", "train", *points[number].overrides])


def submit(points: list[sweep.Point], options: argparse.Namespace) -> None:
    """Check all points, then submit them to SLURM as one array."""
    for point in points:
        compose(list(point.overrides))
    limit = f"%{options.at_once}" if options.at_once else ""
    _sbatch(SWEEP_SCRIPT, f"0-{len(points) - 1}{limit}", options)


def _sbatch(script: Path, array: str, options: argparse.Namespace) -> None:
    """Submit a script as an array, with the overrides as its arguments."""
    roots = [folder for folder in (Path.cwd(), CONF.parent) if (folder / script).exists()]
    if not roots:
        raise ConfigError(f"{script} does not exist in {Path.cwd()}: run --submit in a checkout of clipzoo")
    try:
        batch = ["sbatch", f"--array={array}", *shlex.split(options.sbatch), str(script)]
        code = subprocess.run([*batch, *options.overrides], cwd=roots[0]).returncode
    except FileNotFoundError:
        raise ConfigError("there is no sbatch: run --submit on a machine with SLURM") from None
    except ValueError as error:
        raise ConfigError(f"--sbatch {options.sbatch!r} cannot be read: {error}") from None
    if code:
        raise TrainingError(f"sbatch ended with code {code}, nothing has been submitted")


def show(points: list[sweep.Point], options: argparse.Namespace) -> None:
    """Print the table of the points, and write it with its plot."""
    from clipzoo.report.comparison.sweep import sweep_plot, sweep_rows, sweep_table
    from clipzoo.report.render import markdown

    rows = sweep_rows(points, options.table)
    text = markdown(sweep_table(rows, options.table, options.lowest))
    output = options.output or sweep.sweep_folder(points, options.overrides)
    sweep_plot(rows, options.table, output / "sweep.png", options.lowest)
    write_whole(output / "sweep.md", f"{text}\n\n![{options.table} over the sweep](sweep.png)\n")
    print(f"{text}\n\n{output / 'sweep.md'}")


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("clipzoo launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--point", type=number_in(NonNegativeCount), help="train this point, replacing this process")
    action.add_argument("--submit", action="store_true", help="submit all points as a SLURM array")
    action.add_argument("--table", metavar="METRIC", help="tabulate and plot this metric of results.json, or loss")
    action.add_argument("--to", choices=RECIPES, help="print the file that starts a training on several machines")
    nodes = parser.add_argument_group("with --to")
    nodes.add_argument("--nodes", type=number_in(Count), default=1, help="number of nodes (default: %(default)s)")
    nodes.add_argument("--min-nodes", type=number_in(Count), help="fewest nodes that go on after a loss; default: all")
    nodes.add_argument("--gpus", type=number_in(Count), default=8, help="ranks of a node (default: %(default)s)")
    nodes.add_argument("--max-restarts", type=number_in(NonNegativeCount), default=3, help="default: %(default)s")
    nodes.add_argument("--host", default="HOST", help="first node, of torchrun")
    nodes.add_argument("--port", type=number_in(Count), default=29400, help="of the rendezvous (default: %(default)s)")
    nodes.add_argument("--gpu", default="H100", help="name of the GPU, of SkyPilot (default: %(default)s)")
    nodes.add_argument("--image", default="clipzoo:latest", help="container of Kubernetes (default: %(default)s)")
    nodes.add_argument("--volume", default="runs", help="claim mounted at /runs, of Kubernetes (default: %(default)s)")
    parser.add_argument("--sbatch", default="", help="options for sbatch, in one string")
    parser.add_argument(
        "--at-once",
        type=number_in(Count),
        help="maximum number of points that run at the same time; of a search, the number of processes",
    )
    parser.add_argument("--lowest", action="store_true", help="the lowest value is best")
    parser.add_argument("--output", type=output_folder, help="folder for the table and its plot")
    parser.add_argument("overrides", nargs="*", help="overrides of train; key=a,b,c is swept")
    return parser.parse_intermixed_args(_with_sbatch_joined(arguments))


def _with_sbatch_joined(arguments: list[str]) -> list[str]:
    """Return the arguments with `--sbatch OPTIONS` as one word: argparse would take "--nodes=2 ..." for its own."""
    place = arguments.index("--sbatch") if "--sbatch" in arguments[:-1] else len(arguments)
    joined = ["=".join(arguments[place : place + 2])] if place < len(arguments) else []
    return [*arguments[:place], *joined, *arguments[place + 2 :]]
