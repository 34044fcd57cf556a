"""Where runs are kept, `runs`: a local folder, or a URL of a store with a local copy. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from clipzoo.io import below
from clipzoo.io.stores.filesystem import is_url
from clipzoo.runs.lock import RunLock
from clipzoo.runs.places.ranks import BeforeExit, OnFailure, Ranks
from clipzoo.runs.places.remote import RemoteRuns
from clipzoo.runs.variables import with_variables


class Runs(Protocol):
    """The folder of runs. Every command works on local run directories, `folder` / name."""

    folder: Path

    def names(self) -> list[str]:
        """Return the names of the runs."""
        ...

    def refresh(self, name: str) -> Path:
        """Return the run directory of a name, which need not exist, with the newest small files of the run."""
        ...

    def refresh_file(self, file: str) -> None:
        """Bring one small file of every run up to date."""
        ...

    def kept(
        self, lock: RunLock, ranks: Ranks, on_failure: OnFailure, before_exit: BeforeExit
    ) -> AbstractContextManager[None]:
        """Keep the run of a lock where runs are kept, while it is trained in the block. Collective.

        on_failure: is called with the error if the store has taken nothing for upload_patience seconds. before_exit:
        is given what to do before the process ends early.

        Raises:
            ConfigError: another process trains the run, or the store cannot be used.
            TrainingError: at the end, the store has not taken all files within upload_patience seconds.
        """
        ...

    def complete(self, folder: Path) -> None:
        """Upload what the store lacks of a finished run."""
        ...

    def hydra_overrides(self) -> list[str]:
        """Return the overrides that keep Hydra's own files of a sweep out of a URL."""
        ...


class LocalRuns:
    """Runs in a local folder: they are where they are trained."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def names(self) -> list[str]:
        return [path.name for path in self.folder.glob("*")]

    def refresh(self, name: str) -> Path:
        return below(self.folder, name, links=True)

    def refresh_file(self, file: str) -> None:
        pass

    def kept(
        self, lock: RunLock, ranks: Ranks, on_failure: OnFailure, before_exit: BeforeExit
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def complete(self, folder: Path) -> None:
        pass

    def hydra_overrides(self) -> list[str]:
        return []


def runs_of(plain: Mapping[str, Any]) -> Runs:
    """Return the folder of runs of a configuration. Checks a URL, and asks no store.

    Raises:
        ConfigError: the URL is invalid.
    """
    runs = with_variables(plain["runs"])
    if not is_url(runs):
        return LocalRuns(runs)
    return RemoteRuns(runs, patience=plain["upload_patience"], every=plain["upload_every"])
