"""`clipzoo launch`: the points of a sweep, and files that start a training on several machines."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from clipzoo import io
from clipzoo.cli.arguments import Parser, number_in, own_errors, word
from clipzoo.cli.trials import show_search
from clipzoo.config.compose import compose
from clipzoo.config.groups import CONF
from clipzoo.config.vocabulary import Machines, NonNegativeCount, Port, Restarts
from clipzoo.errors import CHECKOUT, ConfigError, TrainingError
from clipzoo.runs import sweep
from clipzoo.runs.directory import is_finished
from clipzoo.runs.search import Study, search_of, study_folder

LAUNCH = """\
Run a sweep without a resident process: each point is a job of a SLURM array; afterwards, tabulate the points.
With --to, print or write the file that starts one training on several machines.

clipzoo launch data=cc3m head=wpse head.kernel.width=0.5,0.75,1.0 seed=0,1              lists the points
clipzoo launch --submit --sbatch '--gpus-per-node=4' data=cc3m head=wpse seed=0,1       submits sweep.sbatch
clipzoo launch --point 3 data=cc3m head=wpse head.kernel.width=0.5,0.75,1.0 seed=0,1    trains point 3 here
clipzoo launch --table data=cc3m head=wpse head.kernel.width=0.5,0.75,1.0 seed=0,1      compares the finished points
clipzoo launch --submit --at-once 8 experiment=wpse/cc3m_gaussian search=wpse search.sampler=tpe search.trials=40 \\
    search.minimize=loss                            submits 8 processes of a search; without --submit its page
clipzoo launch --to kubernetes --nodes 4 --gpus 8 name=kme runs=/runs experiment=kme/cc12m_kme
                                                    prints a file; or torchrun, pytorchjob, skypilot
clipzoo launch --to slurm train --nodes 4 --output kme.sbatch experiment=kme/cc12m_kme
                                                    writes a batch script; or sweep, search, eval

Points are numbered from 0; the values of the last key change fastest. The table averages over seeds and marks the best
point; the page of the comparison is that of clipzoo train -m.
"""
SLURM = CONF.with_name("slurm")
"""The folder of the batch scripts, of the wheel or of the checkout."""
SCRIPTS = ("train", "sweep", "search", "eval")
MEMORY = 32
"""GB that the batch scripts ask for per rank."""
_IN_CHECKOUT = CHECKOUT / "docs" / "how_to" / "launch"
TEMPLATES = _IN_CHECKOUT if _IN_CHECKOUT.is_dir() else CONF.with_name("launch")
"""The folder of the files for schedulers other than SLURM."""
RECIPES = ("torchrun", "kubernetes", "pytorchjob", "skypilot")


def main(arguments: list[str]) -> None:
    options = _options(arguments)
    with own_errors(options):
        if options.to is not None:
            text, file = batch_script(options) if options.to == "slurm" else recipe(options), options.output
            if file is None:
                print(text, end="")
            elif file.exists() and (not file.is_file() or io.read_bytes(file, io.MB) != text.encode()):
                raise ConfigError(f"--output {file} exists: give another file, or remove it")
            else:
                io.write_whole(file, text)
                print(file)
            return
        if options.submit:
            submit(options)
            return
        if (search := search_of(options.overrides)) is not None:
            if options.point is not None or options.table:
                raise ConfigError("a search draws its points: clipzoo train -m ... trains them, and launch without "
                                  "--point and --table shows them")  # fmt: skip
            for line in search[1].corner_lines():
                compose(line)
            study = Study(study_folder(*search), *search)
            if study.folder.exists():
                show_search(study)
            else:
                print("no trial of the search has been drawn: clipzoo train -m ... begins it")
            return
        points = sweep.points(options.overrides)
        if options.point is not None:
            if not 0 <= options.point < len(points):
                raise ConfigError(f"--point {options.point}: the sweep has points 0 to {len(points) - 1}")
            # The training replaces this process.
            os.environ["CLIPZOO_SWEEP"] = sweep.sweep_name(options.overrides)
            os.execv(sys.executable, [sys.executable, "-m", "clipzoo.cli", "train", *points[options.point].overrides])
        elif options.table:
            from clipzoo.report.pages import write_sweep

            print(write_sweep(options.overrides))
        else:
            for number, point in enumerate(points):
                values = "  ".join(f"{key}={value}" for key, value in point.swept.items())
                state = "finished" if is_finished(point.folder) else ""
                print(f"{number:4}  {values}  {point.folder}  {state}".rstrip())


def batch_script(options: argparse.Namespace) -> str:
    """Return a batch script with overrides and sizes of the command line; it takes further overrides from sbatch."""
    from clipzoo.cli.evaluate import PLACEHOLDERS

    script, *overrides = options.overrides or ("",)
    if script not in SCRIPTS:
        raise ConfigError(f"--to slurm needs one of {', '.join(SCRIPTS)} before the overrides, as in --to slurm train")
    text = (SLURM / f"{script}.sbatch").read_text()
    ranks, devices = options.gpus, options.gpus
    if overrides:
        kind, array = script, ""
        if script == "eval":
            device = compose(overrides, "eval", nodes={"encoder": PLACEHOLDERS})["device"]
        elif script == "train":
            device = compose(overrides)["trainer"]["device"]
        else:
            kind, array, device = _checked_array(overrides, options.at_once)
        if kind != script:
            raise ConfigError(f"--to slurm {script}: the overrides are those of a {kind}, give --to slurm {kind}")
        text = text.replace('"$@"', f'{shlex.join(overrides)} "$@"')
        if array:
            text = text.replace("#SBATCH --nodes=", f"#SBATCH --array={array}\n#SBATCH --nodes=")
        devices = 0 if device == "cpu" else ranks
    memory = ranks and f"{MEMORY * ranks}G"
    settings = {"nodes": options.nodes, "ntasks-per-node": ranks, "gpus-per-node": devices, "mem": memory}
    for option, value in settings.items():
        if value is not None:
            text = re.sub(f"^(#SBATCH --{option}=).*", rf"\g<1>{value}", text, flags=re.MULTILINE)
    return text


def recipe(options: argparse.Namespace) -> str:
    """Return the file that starts the training of the overrides on several nodes, from its template.

    Each node runs `torchrun -m clipzoo.cli train OVERRIDES`; all recipes are elastic if --min-nodes is below --nodes.
    """
    plain = compose(options.overrides)
    nodes, gpus = options.nodes or 1, options.gpus or 8
    min_nodes = options.min_nodes or nodes
    if min_nodes > nodes:
        raise ConfigError(f"--min-nodes {min_nodes} is more than --nodes {nodes}")
    name = (plain["name"] or "clipzoo").lower()
    # Names that Kubernetes allows, with room for the index of a pod.
    if not re.fullmatch("[a-z]([a-z0-9-]{0,51}[a-z0-9])?", name):
        raise ConfigError(f"name={plain['name']} is not a valid job name: use letters, digits and -, as in name=kme")
    node_range = str(nodes) if min_nodes == nodes else f"{min_nodes}:{nodes}"
    train = ["-m", "clipzoo.cli", "train", *options.overrides]
    arguments = [
        "--nnodes", node_range, "--nproc-per-node", str(gpus), "--max-restarts", str(options.max_restarts),
        "--rdzv-backend", "c10d", "--rdzv-id", name, *train,
    ]  # fmt: skip
    import jinja2

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters |= {"json": json.dumps, "shell": shlex.join}
    return environment.from_string(next(TEMPLATES.glob(f"{options.to}.*")).read_text()).render(
        vars(options), name=name, nodes=nodes, min_nodes=min_nodes, node_range=node_range, gpus=gpus, train=train,
        arguments=arguments, on_cpu=plain["trainer"]["device"] == "cpu",
    )  # fmt: skip


def _checked_array(overrides: list[str], at_once: int | None) -> tuple[str, str, str]:
    """Check all points of a sweep or the corners of a search; return the batch script, its array, and the device."""
    if (search := search_of(overrides)) is not None:
        plain = [compose(line) for line in search[1].corner_lines()]
        return "search", f"0-{(at_once or 1) - 1}", plain[0]["trainer"]["device"]
    plain = [compose(point.overrides) for point in sweep.points(overrides)]
    return "sweep", f"0-{len(plain) - 1}{f'%{at_once}' if at_once else ''}", plain[0]["trainer"]["device"]


def submit(options: argparse.Namespace) -> None:
    """Check all points, then submit them to SLURM as one array, with the script of ./slurm if there is one."""
    script, array, _ = _checked_array(options.overrides, options.at_once)
    user_script = Path("slurm") / f"{script}.sbatch"
    file = user_script if user_script.exists() else SLURM / user_script.name
    try:
        batch = ["sbatch", f"--array={array}", *shlex.split(options.sbatch), str(file), *options.overrides]
        code = subprocess.run(batch, env={"PYTHON": sys.executable, **os.environ}).returncode
    except FileNotFoundError:
        raise ConfigError("there is no sbatch: run --submit on a machine with SLURM") from None
    except ValueError as error:
        raise ConfigError(f"--sbatch {options.sbatch!r} cannot be read: {error}") from None
    if code:
        raise TrainingError(f"sbatch ended with code {code}, nothing has been submitted")


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("clipzoo launch", description=LAUNCH, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--point", type=number_in(NonNegativeCount), help="train this point, replacing this process")
    action.add_argument("--submit", action="store_true", help="submit all points as a SLURM array")
    action.add_argument("--table", action="store_true", help="compare the finished points, as clipzoo train -m does")
    action.add_argument("--to", choices=("slurm", *RECIPES), help="print or write the file that starts a training on "
                        f"several machines; slurm takes one of {', '.join(SCRIPTS)} before the overrides")  # fmt: skip
    size, nodes, pods = number_in(Machines), ["--to"], ["--to kubernetes", "--to pytorchjob"]
    recipes, default = [f"--to {name}" for name in RECIPES], "(default: %(default)s)"
    parser.add_argument("--nodes", type=size, needs=nodes, help="number of nodes (default: 1)")
    parser.add_argument("--min-nodes", type=size, needs=recipes, help="fewest nodes that continue after a loss; "
                        "default: all")  # fmt: skip
    parser.add_argument("--gpus", type=size, needs=nodes, help="ranks of a node (default: 8; of slurm eval 1)")
    parser.add_argument("--max-restarts", type=number_in(Restarts), default=3, needs=recipes,
                        help=f"of the ranks {default}")  # fmt: skip
    parser.add_argument("--host", type=word("[A-Za-z0-9.:-]"), default="HOST", needs=["--to torchrun"],
                        help="first node")  # fmt: skip
    parser.add_argument("--port", type=number_in(Port), default=29400, help=f"of the rendezvous {default}",
                        needs=["--to torchrun", "--to kubernetes", "--to skypilot"])  # fmt: skip
    parser.add_argument("--gpu", type=word("[A-Za-z0-9_.-]"), default="H100", needs=["--to skypilot"],
                        help=f"name of the GPU {default}")  # fmt: skip
    parser.add_argument("--image", type=word("[A-Za-z0-9_./:@-]"), default="clipzoo:latest", needs=pods,
                        help=f"container {default}")  # fmt: skip
    parser.add_argument("--volume", type=word("[a-z0-9.-]"), default="runs", needs=pods,
                        help=f"claim mounted at /runs {default}")  # fmt: skip
    parser.add_argument("--sbatch", default="", needs=["--submit"], help="options for sbatch, in one string")
    parser.add_argument("--at-once", type=size, needs=["--submit", "--to slurm"], help="maximum number of points that "
                        "run at the same time; of a search, the number of processes")  # fmt: skip
    parser.add_argument("--output", type=Path, needs=["--to"], help="file to write")
    parser.add_argument("overrides", nargs="*", help="overrides of train; key=a,b,c is swept")
    # `--sbatch OPTIONS` becomes one word: argparse would read "--nodes=2 ..." as its own option.
    position = arguments.index("--sbatch") if "--sbatch" in arguments[:-1] else len(arguments)
    joined = ["=".join(arguments[position : position + 2])] if position < len(arguments) else []
    return parser.parse_intermixed_args([*arguments[:position], *joined, *arguments[position + 2 :]])
