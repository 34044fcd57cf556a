"""The processes of a training and the ways to end it, for the place where its run is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from clipzoo.errors import TrainingError

T = TypeVar("T")
OnFailure = Callable[[TrainingError], None]
"""Asks the training to end because of an error."""
BeforeExit = Callable[[Callable[[], None]], None]
"""Adds what to do before the process ends early."""


class Ranks(Protocol):
    """The processes of a training, such as `clipzoo.distributed.world.World`."""

    @property
    def is_first(self) -> bool: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def run_on_first(self, action: Callable[[], T]) -> T: ...
    def barrier(self) -> None: ...
