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


def run_main(main: Callable[[], int | None]) -> None:
    """Run the `main` of a script and exit with its code; its errors are single messages, as those of `clipzoo`."""
    with exit_on_error():
        sys.exit(main())


@contextmanager
def own_errors(options: argparse.Namespace) -> Iterator[None]:
    """Let errors name the options of a command.

    An OSError about a path of the command line, or a folder above or below it, becomes a ConfigError. A ConfigError
    that asks for the key `trust=PACKAGE` asks for the option `--trust PACKAGE` if the command has it.
    """
    given = [value.absolute() for value in vars(options).values() if isinstance(value, Path)]
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


def _parsed(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return math.nan
