"""Rows of a part of the benchmark of a GPU, written one by one: a part that is stopped keeps those it has."""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
"""table, name, and either the values that were measured or one of `failed`, `out_of_memory` and `left_out`."""


@dataclass(frozen=True)
class Settings:
    """device: "cuda" or "cpu". small: sizes for a rehearsal. seconds: time of the part, after which it leaves rows out.

    rows: the file of JSON lines.
    """

    device: str
    small: bool
    seconds: float
    rows: str


class Recorder:
    """Collects the rows of one part."""

    def __init__(self, settings: Settings) -> None:
        self.device, self.small = torch.device(settings.device), settings.small
        self._path, self._end = Path(settings.rows), time.monotonic() + settings.seconds

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def add(self, table: str, name: str, values: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"table": table, "name": name, **values}) + "\n")
        print(f"{name}: {_shown(values)}", flush=True)

    def measure(self, table: str, name: str, function: Callable[[], Mapping[str, Any]]) -> None:
        """Add a row of the function's values. If it raises, or the time is used up, the row says so."""
        if self.seconds_left <= 0:
            self.add(table, name, {"left_out": "the part's time was used up"})
            return
        values: Mapping[str, Any]
        try:
            values = function()
        except torch.OutOfMemoryError:
            values = {"out_of_memory": True}
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            values = {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}
        self.add(table, name, values)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file; a last line that was cut off is left out."""
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def _shown(values: Mapping[str, Any]) -> str:
    numbers = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in values.items()}
    return ", ".join(f"{key} {value}" for key, value in numbers.items() if not isinstance(value, list))
