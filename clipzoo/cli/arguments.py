"""Command lines of argparse: their errors are ConfigErrors, and their numbers have the ranges of the vocabulary."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from clipzoo.config.annotations import kind_of_object
from clipzoo.config.groups import VARIABLE
from clipzoo.config.vocabulary import Count
from clipzoo.distributed.reporting import exit_on_error
from clipzoo.errors import ConfigError
from clipzoo.io.stores.filesystem import is_url

OUTPUTS = {"output", "static", "cache"}
"""Arguments that name a folder for results; their `type` is `output_folder`."""


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError for a wrong command line; so do the parsers of its subcommands."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def number_in(annotation: Any) -> Callable[[str], Any]:
    """Return an argparse `type` that admits the numbers of an annotation, such as `vocabulary.Count`."""
    kind = kind_of_object(annotation)

    def read(text: str) -> Any:
        value = _parsed(text)
        if not kind.admits(value):
            raise argparse.ArgumentTypeError(f"must be {kind.words}, not {text!r}")
        return value

    return read


def add_batch(parser: argparse.ArgumentParser) -> None:
    """Add --batch, for which the expected number of equal captions is printed."""
    parser.add_argument(
        "--batch", type=number_in(Count), default=2048,
        help="batch size for which the expected number of equal captions is printed (default: %(default)s)",
    )  # fmt: skip


def output_folder(text: str) -> Path:
    """Return the folder of `--output`; an argparse `type`. See `output_fault`."""
    if fault := output_fault(text):
        raise argparse.ArgumentTypeError(fault)
    return Path(text)


def output_fault(text: str) -> str | None:
    """Return why results cannot be written to a folder, None if they can: it is no folder, or has a run or a model."""
    path, fault = Path(text), None
    if not text.strip():
        fault = "names no folder"
    elif is_url(text):
        fault = "is a URL, but results are written to the disk"
    elif path.exists() and not path.is_dir():
        fault = "is not a folder"
    elif (path / "config.yaml").exists() or (path / "checkpoints").exists():
        fault = "is a run directory"
    elif any(file.suffix in (".safetensors", ".pt2", ".onnx") for file in path.glob("*")):
        fault = "has an exported model"
    return None if fault is None else f"{text!r} {fault}: give another folder"


def run_main(main: Callable[[], int | None]) -> None:
    """Run the `main` of a script and exit with its code; its errors are single messages, as those of `clipzoo`."""
    with exit_on_error():
        sys.exit(main())


@contextmanager
def own_errors(options: argparse.Namespace) -> Iterator[None]:
    """Let errors name the options of a command.

    An OSError about a path of the command line, or a folder above or below it, becomes a ConfigError. A ConfigError
    that asks for the key `trust=PACKAGE` asks for the option `--trust PACKAGE` if the command has it.

    Raises:
        ConfigError: the folder for the results is an input, too.
    """
    given = [value.absolute() for value in vars(options).values() if isinstance(value, Path)]
    for name in OUTPUTS & vars(options).keys():
        inputs = [one for key, value in vars(options).items() if key not in OUTPUTS for one in _texts(value)]
        output = getattr(options, name)
        if output is not None and any(os.path.realpath(output) == os.path.realpath(one) for one in inputs):
            raise ConfigError(f"{output} is read by this command: give another --{name}")
    try:
        yield
    except ConfigError as error:
        if "trust" in options:
            error.args = (str(error).replace("add trust=", "add --trust "),)
        raise
    except OSError as error:
        failed = None if error.filename is None else Path(str(error.filename)).absolute()
        if failed is not None and any(failed.is_relative_to(path) or path.is_relative_to(failed) for path in given):
            raise ConfigError(f"{error.filename}: {error.strerror}") from None
        raise


def with_config_folder(arguments: list[str]) -> list[str]:
    """Set the folder of `--config-dir FOLDER` for this process and its children; return the other arguments."""
    parser = Parser("clipzoo", add_help=False, allow_abbrev=False)
    parser.add_argument("-cd", "--config-dir")
    options, others = parser.parse_known_args(arguments)
    if options.config_dir is not None:
        os.environ[VARIABLE] = os.path.abspath(os.path.expanduser(options.config_dir))
    return others


def _texts(value: object) -> Iterator[str]:
    """Yield the texts and paths of an argument that may be a list."""
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, str | Path) and str(one):
            yield str(one)


def _parsed(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return math.nan
