"""Parsers of argparse that raise ConfigError, and progress lines on the terminal."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from clipzoo.config.groups import VARIABLE
from clipzoo.config.schema import kind_of
from clipzoo.config.vocabulary import Samples
from clipzoo.distributed.launch import exit_on_error, read
from clipzoo.errors import ConfigError
from clipzoo.io import shortened
from clipzoo.io.stores import is_url

LONGEST_NAME, LONGEST_PATH = 255, 4096
"""Sizes in bytes that file systems and Linux allow for the name of a file and for a path."""
PROGRESS_SECONDS = 3.0
"""Shortest time between two lines of progress."""
OUTPUTS = {"output", "static", "cache"}
"""Arguments that name a folder for results; their `type` is `output_folder`."""


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError for a wrong command line; so do the parsers of its subcommands.

    Texts and paths must be valid UTF-8 and not blank, and no list has a value twice. An option that is declared with
    `needs=["--table", "--to hub"]` is refused unless one of these options is given, with this value if one is named.
    `given` in the namespace holds the names of the options on the command line.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._needs: dict[argparse.Action, Sequence[str]] = {}
        self._given: set[argparse.Action] = set()
        super().__init__(*arguments, **settings)
        self.register("type", Path, _path)

    def add_argument(self, *names: str, needs: Sequence[str] = (), **settings: Any) -> argparse.Action:  # type: ignore[override]
        action = super().add_argument(*names, **settings)
        if needs:
            self._needs[action] = needs
            action.help = f"with {' or '.join(needs)}: {action.help}"
        return action

    def parse_known_args(self, *arguments: Any, **settings: Any) -> Any:
        return self._checked(super().parse_known_args, *arguments, **settings)

    def parse_known_intermixed_args(self, *arguments: Any, **settings: Any) -> Any:
        return self._checked(super().parse_known_intermixed_args, *arguments, **settings)

    def _checked(self, parse: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        self._given.clear()
        options, remaining = parse(*arguments, **settings)
        given = {name: getattr(options, action.dest, None) for action in self._given for name in action.option_strings}
        for action in self._given & self._needs.keys():
            needed = self._needs[action]
            if not any(one in given or one in (f"{name} {value}" for name, value in given.items()) for one in needed):
                raise ConfigError(f"{action.option_strings[-1]} has no effect without {' or '.join(needed)}")
        for action in self._given:
            values = getattr(options, action.dest, None)
            if not isinstance(values, list) or action.nargs in ("*", argparse.REMAINDER):
                continue
            if duplicates := [*(Counter(values) - Counter({*values}))]:
                raise ConfigError(f"{'/'.join(action.option_strings) or action.metavar} {duplicates[0]} is given twice")
        options.given = {*given, *vars(options).get("given", ())}
        return options, remaining

    def _get_values(self, action: argparse.Action, texts: list[str]) -> Any:
        # Called only for the options and positional arguments on the command line.
        self._given.add(action)
        for text in texts if action.nargs not in (argparse.PARSER, argparse.REMAINDER) else ():
            if not text.strip():
                raise argparse.ArgumentError(action, f"must not be blank, not {text!r}")
            if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
                raise argparse.ArgumentError(action, f"{text!r} is not valid UTF-8")
        return super()._get_values(action, texts)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def refuse(options: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise ConfigError if one of these options was given. why: ends the message, such as "is for tables"."""
    for name in names:
        if name in options.given:
            raise ConfigError(f"{name} {why}")


def word(characters: str) -> Callable[[str], str]:
    """Return an argparse `type` for a word: a letter or digit, then characters of this regular expression's class."""

    def read(text: str) -> str:
        if not re.fullmatch(f"[A-Za-z0-9]{characters}{{0,252}}", text):
            raise argparse.ArgumentTypeError(f"must be a word of {characters[1:-1]}, not {shortened(text)}")
        return text

    return read


def _path(text: str) -> Path:
    path = Path(text)
    if len(text.encode()) > LONGEST_PATH or any(len(part.encode()) > LONGEST_NAME for part in path.parts):
        raise argparse.ArgumentTypeError(
            f"{shortened(text)} is longer than {LONGEST_PATH} bytes, or a name in it is longer than {LONGEST_NAME}"
        )
    for parent in path.parents:
        if os.path.lexists(parent) and not parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text} cannot exist: {parent} is not a folder")
    return path


def number_in(annotation: Any) -> Callable[[str], Any]:
    """Return an argparse `type` that admits the numbers of an annotation, such as `vocabulary.Count`."""
    kind = kind_of(annotation)

    def read(text: str) -> Any:
        value: Any = math.nan
        for number in (float, int):
            with suppress(ValueError):
                value = number(text)
        if not kind.admits(value):
            raise argparse.ArgumentTypeError(f"must be {kind.words}, not {text!r}")
        return value

    return read


def add_batch(parser: argparse.ArgumentParser) -> None:
    """Add --batch, the batch size for which the expected number of equal captions is printed."""
    parser.add_argument("--batch", type=number_in(Samples), default=2048,
                        help="batch size for the expected number of equal captions (default: %(default)s)")  # fmt: skip


def add_engine(parser: argparse.ArgumentParser, default: str | None, said: str) -> None:
    """Add --on, see `clipzoo.data.maps.engines.run_map`. said: the default in words."""
    parser.add_argument("--on", default=default, metavar="ENGINE", help="local:PROCESSES, torchrun, slurm (under srun "
                        f"or in an array) or ray; default: {said}")  # fmt: skip


def output_folder(text: str) -> Path:
    """Return the folder of `--output`; an argparse `type`. See `output_fault`."""
    path = _path(text)
    if fault := output_fault(text):
        raise argparse.ArgumentTypeError(fault)
    return path


def output_fault(text: str) -> str | None:
    """Return why results cannot be written to a path: it is not a folder, or has a run or a model; None if they can."""
    path, fault = Path(text), None
    if not text.strip():
        fault = "names no folder"
    elif is_url(text):
        fault = "is a URL, but results are written to the disk"
    elif os.path.lexists(path) and not path.is_dir():
        fault = "is not a folder"
    elif (path / "config.yaml").exists() or (path / "checkpoints").exists():
        fault = "is a run directory"
    elif any(file.suffix in (".safetensors", ".pt2", ".onnx") for file in path.glob("*")):
        fault = "has an exported model"
    return None if fault is None else f"{text!r} {fault}: give another folder"


def run_main(main: Callable[[], int | None]) -> None:
    """Run the `main` of a script and exit with its code; errors are single messages, as in `clipzoo`."""
    with exit_on_error():
        sys.exit(main())


@contextmanager
def own_errors(options: argparse.Namespace) -> Iterator[None]:
    """Rewrite errors so that they name the options of a command.

    An OSError about a path of the command line, or a folder above or below it, becomes a ConfigError. A ConfigError
    that asks for the key `trust=PACKAGE` asks for the option `--trust PACKAGE` if the command has it. A folder for the
    results that is an input, too, is a ConfigError.
    """
    # The texts and paths of all arguments, which may be lists.
    texts = [
        (key, text)
        for key, value in vars(options).items()
        for text in (value if isinstance(value, list | tuple) else [value])
        if isinstance(text, str | Path) and str(text)
    ]
    paths = [Path(text).absolute() for _, text in texts]
    for name in OUTPUTS & vars(options).keys():
        inputs = [text for key, text in texts if key not in OUTPUTS and os.path.exists(text)]
        output = getattr(options, name)
        if output is not None and any(os.path.realpath(output) == os.path.realpath(text) for text in inputs):
            raise ConfigError(f"{output} is read by this command: give another --{name}")
    try:
        yield
    except ConfigError as error:
        if "trust" in options:
            error.args = (str(error).replace("add trust=", "add --trust "),)
        raise
    except OSError as error:
        failed = None if error.filename is None else Path(str(error.filename)).absolute()
        if failed is not None and any(failed.is_relative_to(path) or path.is_relative_to(failed) for path in paths):
            raise ConfigError(f"{error.filename}: {error.strerror}") from None
        raise


def with_config_folder(arguments: list[str]) -> list[str]:
    """Set the folder of `--config-dir FOLDER` for this process and its children; return the other arguments."""
    parser = Parser("clipzoo", add_help=False, allow_abbrev=False)
    parser.add_argument("-cd", "--config-dir")
    options, remaining = parser.parse_known_args(arguments)
    if options.config_dir is not None:
        os.environ[VARIABLE] = os.path.abspath(os.path.expanduser(options.config_dir))
    return remaining


class Progress:
    """Prints "work: done of total unit" and the remaining time, on the first rank: `progress(done, total)`."""

    def __init__(self, work: str, unit: str) -> None:
        self._work, self._unit = work, unit
        self._start = self._last_line = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._last_line < PROGRESS_SECONDS or done >= total or not read().is_first:
            return
        self._last_line = time.monotonic()
        line = f"== {self._work}: {done:,} of {total:,} {self._unit}"
        # The time of the first items includes the start of the processes.
        if done / total >= 0.02:
            line += f", {self.seconds * (total - done) / done:.0f} s left"
        print(line, file=sys.stderr, flush=True)
