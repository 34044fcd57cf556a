"""Training in a store: `runs=s3://...`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipzoo.distributed import environment
from clipzoo.runs.lock import RunLock
from clipzoo.runs.remote import RemoteRun, remote_runs
from clipzoo.runs.variables import with_variables

if TYPE_CHECKING:
    from clipzoo.distributed.preemption import Preemption
    from clipzoo.distributed.world import World


def remote_run(plain: Mapping[str, Any], folder: Path) -> RemoteRun | None:
    """Return the run in the store of `runs`, None if that is a local folder. folder: local copy of the run."""
    runs = remote_runs(with_variables(plain["runs"]))
    if runs is None:
        return None
    return RemoteRun(runs.store / folder.name, folder, plain["upload_patience"], plain["upload_every"])


@contextmanager
def locked_run(plain: Mapping[str, Any], folder: Path, world: World, preemption: Preemption) -> Iterator[RunLock]:
    """Yield the lock of a run directory. A run in a store is fetched first, and the store kept up to date. Collective.

    Raises:
        ConfigError: another process trains the run, or the store cannot be used.
        TrainingError: at the end, the store has not taken all files within upload_patience seconds.
    """
    with RunLock(folder) as lock:
        run = remote_run(plain, folder)
        if run is None:
            yield lock
        else:
            with _kept_in_store(run, lock, world, preemption):
                yield lock


@contextmanager
def _kept_in_store(run: RemoteRun, lock: RunLock, world: World, preemption: Preemption) -> Iterator[None]:
    run.on_failure = preemption.request
    needed = world.run_on_first(lambda: run.begin(lock))
    if world.local_rank == 0 and not world.is_first:
        run.fetch(needed)
    world.barrier()
    environment.say(f"{run.store.url} is kept up to date with its local copy {run.folder}")
    if world.is_first:
        preemption.watchdog.before_exit(run.finish_at_exit)
    try:
        yield
    except Exception:
        # Several ranks end through the watchdog, which calls `finish_at_exit`.
        if world.size == 1:
            run.finish_at_exit()
        raise
    world.run_on_first(run.finish)


def upload_rest(plain: Mapping[str, Any], folder: Path) -> None:
    """Upload what the store lacks of a finished run, if it is in a store. On the first rank."""
    run = remote_run(plain, folder) if environment.read().is_first else None
    if run is not None and run.is_behind():
        with RunLock(folder) as lock:
            run.begin(lock)
            run.finish()


def sweep_folder(runs: str) -> list[str]:
    """Return the override that keeps Hydra's own files of a sweep out of a URL."""
    remote = remote_runs(with_variables(runs))
    return [] if remote is None else [f"hydra.sweep.dir='{remote.folder / 'multirun'}'"]
