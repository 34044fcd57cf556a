"""Compare methods with equal search budgets and fresh seeds on generated scenes.

The same command continues after a kill.

clipzoo lab                                     the lab of conf/lab/default.yaml, in the folder lab/default
clipzoo lab my_lab.yaml --output lab/mine       your own lab
clipzoo lab --methods CLIP KME-CLIP --seeds 10  some methods, more seeds
clipzoo lab scaling                             power laws in compute, samples and width
clipzoo lab mine.yaml --config-dir conf --trust mypackage   a lab with your own head
clipzoo lab --report                            the page of the trainings so far

Any number of processes may run the same command: they share the trainings.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path

from clipzoo.cli.arguments import number_in, output_folder, with_config_folder
from clipzoo.config.vocabulary import Count
from clipzoo.io import below


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lab", nargs="?", default="default", help="name in conf/lab, or a YAML file")
    parser.add_argument("--output", type=output_folder, help="folder of the lab (default: lab/NAME)")
    parser.add_argument("--methods", nargs="+", default=[], metavar="METHOD", help="only these methods")
    parser.add_argument("--comparisons", nargs="+", default=[], metavar="WORLD-TOWER", help="only these comparisons")
    parser.add_argument("--seeds", type=number_in(Count), help="fresh seeds of every winner")
    parser.add_argument(
        "--trust", nargs="+", default=[], metavar="PACKAGE", help="packages of the methods' own classes"
    )
    parser.add_argument(
        "--config-dir", type=Path, metavar="FOLDER", help="folder of custom config options, as for clipzoo train"
    )
    parser.add_argument("--report", action="store_true", help="train nothing; write the page of the trainings so far")
    parser.add_argument(
        "--page", type=Path, help="file of the Markdown page (default: lab.md in the folder of the lab)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from clipzoo.report.lab.page import write_page
    from clipzoo.studies.lab.settings import read_settings

    if options.config_dir is not None:
        with_config_folder(["--config-dir", str(options.config_dir)])
    lab = read_settings(options.lab).chosen(options.methods, options.comparisons, options.seeds)
    lab = replace(lab, trust=tuple(options.trust))
    output = options.output or below(Path("lab"), lab.name)
    if not options.report:
        from clipzoo.studies.lab.run import run_lab

        run_lab(lab, output)
    page, index = write_page(output, options.page, _command(options), lab.said)
    print(f"the page of the lab: {page}, {index}")


def _command(options: argparse.Namespace) -> str:
    """Return the command that trains what these options choose."""
    words = ["clipzoo", "lab", *([] if options.lab == "default" else [options.lab])]
    for name in ("methods", "comparisons", "seeds", "trust", "config_dir"):
        if value := getattr(options, name):
            words += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)
