"""Sweeps without a resident process: points as jobs of a SLURM array, and their table.

python scripts/launch.py head=wpse head.kernel.width=0.5,0.75,1.0 seed=0,1                lists the points
python scripts/launch.py --submit --sbatch '--gpus-per-node=4' head=wpse seed=0,1          submits slurm/sweep.sbatch
python scripts/launch.py --point 3 head=wpse head.kernel.width=0.5,0.75,1.0 seed=0,1      trains point 3 here
python scripts/launch.py --table zero_shot/imagenet/top1 head=wpse head.kernel.width=0.5,0.75,1.0 seed=0,1

Points are numbered from 0, the last key's values changing fastest. The table marks the best point, seeds averaged, and
stands with its plot in <output>.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

from clipzoo.config import compose as configuration
from clipzoo.config import sweep
from clipzoo.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    options = _options()
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
            state = "finished" if (point.folder / "results.json").exists() else ""
            print(f"{number:4}  {values}  {point.folder}  {state}".rstrip())


def train(points: list[sweep.Point], number: int, overrides: list[str]) -> None:
    """Become train.py with the overrides of one point."""
    if not 0 <= number < len(points):
        raise ConfigError(f"--point {number}: the sweep has points 0 to {len(points) - 1}")
    os.environ["CLIPZOO_SWEEP"] = sweep.sweep_name(overrides)
    os.execv(sys.executable, [sys.executable, str(ROOT / "train.py"), *points[number].overrides])


def submit(points: list[sweep.Point], options: argparse.Namespace) -> None:
    """Hand all points to SLURM as one array, once every one of them is known to be valid."""
    for point in points:
        configuration.composed(list(point.overrides))
    (last, limit) = (len(points) - 1, f"%{options.at_once}" if options.at_once else "")
    batch = ["sbatch", f"--array=0-{last}{limit}", *shlex.split(options.sbatch), "slurm/sweep.sbatch"]
    subprocess.run([*batch, *options.overrides], cwd=ROOT, check=True)


def show(points: list[sweep.Point], options: argparse.Namespace) -> None:
    """Print the table, and write it with its plot."""
    rows = sweep.rows(points, options.table)
    text = sweep.table(rows, options.table, options.lowest)
    output = options.output or Path("runs") / sweep.sweep_name(options.overrides)
    sweep.plot(rows, options.table, output / "sweep.png", options.lowest)
    (output / "sweep.md").write_text(f"{text}\n\n![{options.table} over the sweep](sweep.png)\n")
    print(f"{text}\n\n{output / 'sweep.md'}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--point", type=int, help="train this point, in place of this process")
    action.add_argument("--submit", action="store_true", help="submit all points as a SLURM array")
    action.add_argument("--table", metavar="METRIC", help="of results.json, or loss: show and plot what came out")
    parser.add_argument("--sbatch", default="", help="options for sbatch, in one string")
    parser.add_argument("--at-once", type=int, help="most points that run at the same time")
    parser.add_argument("--lowest", action="store_true", help="the lowest value is the best")
    parser.add_argument("--output", type=Path, help="folder of the table and its plot")
    parser.add_argument("overrides", nargs="*", help="of train.py; key=a,b,c is swept")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # as for train.py: a user's own classes stand beside it
    try:
        main()
    except ConfigError as error:
        configuration.leave(error)
