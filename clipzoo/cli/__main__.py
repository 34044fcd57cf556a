"""The `clipzoo` command. Only the module of the given subcommand is imported, so that help appears at once.

Shell completion: `eval "$(register-python-argcomplete clipzoo)"` switches it on.
"""

from __future__ import annotations

import argparse
import inspect
import os
import signal
import sys
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from io import StringIO

from clipzoo.cli.arguments import Parser, own_errors, with_config_folder
from clipzoo.distributed import launch
from clipzoo.distributed.launch import exit_on_error

OVERRIDE_COMMANDS = {
    "train": ("cli.train", "train a model, or resume its run"),
    "evaluate": ("cli.evaluate", "evaluate a run, a checkpoint or an open_clip model"),
    "launch": ("cli.launch", "list, submit, run or tabulate the points of a sweep"),
    "plan": ("plan.plan", "predict memory, traffic and time of a training on hardware you do not have at hand"),
    "studies": ("lab.studies.run", "run the papers' small experiments"),
}
"""Commands that take Hydra overrides: the module whose `main(arguments)` parses them, and a summary."""

COMMANDS = {
    "doctor": ("cli.doctor.doctor_arguments", "check this machine: GPU, kernels, ranks, disks, clock, store, versions"),
    "ls": ("cli.status.ls_arguments", "list runs, searches, labs and maps with their states"),
    "watch": ("cli.status.watch_arguments", "show runs, searches, labs and maps while they run"),
    "report": ("cli.report.report_arguments", "write the report of a run, or the papers' tables with finished runs"),
    "config": ("cli.report.config_arguments", "list the keys of a run: type, default, meaning, options"),
    "compare": ("cli.report.compare_arguments", "compare runs: metrics, intervals and paired tests of differences"),
    "lab": ("lab.methods.lab.add_arguments", "compare methods with equal search budgets on generated scenes"),
    "explore": ("cli.models.explore_arguments", "explore trained models in a browser: search, neighbours, maps"),
    "export": ("cli.models.export_arguments", "write a model for open_clip, transformers, torch.export or onnxruntime"),
    "index": ("cli.models.index_arguments", "embed images once, to search them"),
    "features": ("cli.models.features_arguments", "embed a dataset's images and captions once, for teacher=stored"),
    "search": ("cli.models.search_arguments", "search an index of images by captions"),
    "migrate": ("cli.migrate.migrate_arguments", "translate a command of open_clip's training or of CLIP_benchmark"),
    "shards": ("cli.data.shards_arguments", "make, index or look at WebDataset shards"),
    "datasets": ("cli.data.datasets_arguments", "list or convert the benchmark datasets, or make your own"),
    "world": ("lab.worlds.world.add_arguments", "generate the demo's dataset"),
    "twin": ("lab.twin.add_arguments", "train as open_clip does, or find where two runs part"),
    "emoji": ("lab.worlds.emoji.add_arguments", "get emoji of two vendors as a dataset"),
    "hands": ("lab.worlds.hands.add_arguments", "get drawings of the same things by many hands as a dataset"),
}
"""Commands with arguments of argparse: the function that declares them, and a summary. The description of a command is
the docstring of the function, or else of its module."""


def main(*command: str) -> int:
    """Run `clipzoo COMMAND ARGUMENTS` and return its exit code. command: words before the arguments, from a script."""
    launch.set_environment()
    arguments = [*command, *sys.argv[1:]]
    if arguments and arguments[0] in ("train", "evaluate", "launch"):
        # Asked to stop while they import, they exit with code 75, so that their job is requeued. A launcher's own
        # handlers stay, and so do ignored signals.
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, launch.exit_before_the_run)
    # The user's own classes may be in the working directory.
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)
    with exit_on_error():
        if arguments and arguments[0] in OVERRIDE_COMMANDS:
            module, _ = OVERRIDE_COMMANDS[arguments[0]]
            return import_module(f"clipzoo.{module}").main(with_config_folder(arguments[1:])) or 0
        # A shell that asks for completions gives no arguments.
        parser = _parser(None if "_ARGCOMPLETE" in os.environ else next(iter(arguments), ""))
        if "_ARGCOMPLETE" in os.environ:
            import argcomplete

            argcomplete.autocomplete(parser)
        options = parser.parse_args(arguments)
        with own_errors(options):
            options.run(options)
    return 0


def _parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands. chosen: the command whose arguments are declared; None for all."""
    from importlib.metadata import version  # imports the email package

    parser = Parser(prog="clipzoo", description="Contrastive image-text pretraining.")
    parser.add_argument("--version", action="version", version=f"clipzoo {version('clipzoo')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (_, summary) in OVERRIDE_COMMANDS.items():
        overrides = commands.add_parser(name, help=summary).add_argument("overrides", nargs="*", metavar="KEY=VALUE")
        config_name = {"evaluate": "eval", "studies": "studies"}.get(name, "train")
        overrides.completer = partial(_complete, config_name)  # type: ignore[attr-defined]
    for name, (function, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if chosen in (None, name):
            module, _, function = f"clipzoo.{function}".rpartition(".")
            declare = getattr(import_module(module), function)
            command.description = inspect.getdoc(declare) or sys.modules[module].__doc__
            declare(command)
    return parser


def _complete(config_name: str, prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Complete Hydra overrides of the configuration `config_name`, for argcomplete."""
    from clipzoo.cli.train import job
    from clipzoo.config.groups import hide_internal_options, own_folder

    user_folder = own_folder()
    folder_option = [] if user_folder is None else ["--config-dir", str(user_folder)]
    hide_internal_options()
    sys.argv = ["clipzoo", "--config-name", config_name, *folder_option, "--shell-completion", "query=bash"]
    os.environ["COMP_LINE"] = " ".join(["clipzoo", *(parsed_args.overrides or []), prefix])
    with redirect_stdout(StringIO()) as completions:
        job()
    return completions.getvalue().split()


if __name__ == "__main__":
    sys.exit(main())
