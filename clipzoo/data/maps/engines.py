"""Maps: a function of an item, such as a shard, writes a file named by the item's content, on an existing engine.

All engines write the same bytes: they only choose the process that computes an item. A file is written atomically and
never again, so the same command continues after any kill, also on another engine.
"""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import re
import signal
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from clipzoo import io
from clipzoo.data.tables.formats import arrow
from clipzoo.distributed.launch import share_of_work
from clipzoo.errors import ConfigError, TrainingError, cause, first_line, imported

if TYPE_CHECKING:
    import pyarrow as pa

Task = tuple[int, Path]
"""An item and its file."""
PR_SET_PDEATHSIG = 1
AHEAD = 3
"""Chunks per process that are computed ahead of the results that are taken."""
Argument = TypeVar("Argument")
Result = TypeVar("Result")
_function: list[Callable[[Any], Any]] = []
"""In a child process of `map_in_children`: what it computes, sent once and not with every argument."""


class UnfinishedError(TrainingError):
    """Other processes of torchrun or SLURM still compute their items: only the last of them continues."""

    exit_code = 0


class Map(ABC):
    """A function of items. Instances are sent to other processes.

    suffix: of the files. least_items: items that are worth a process. gpus: of a process; its LOCAL_RANK is the number.
    """

    suffix: str
    least_items, gpus = 1, 0

    @abstractmethod
    def contents(self) -> Sequence[str]:
        """Return a text for every item that differs if its file differs: the kind of map, its content, all settings."""

    @abstractmethod
    def write(self, item: int, file: Path) -> None:
        """Write the file of an item as a whole, the same bytes in every process."""

    def files(self, folder: Path) -> list[Path]:
        """Return the file of every item; items of the same content share one."""
        names = (hashlib.sha256(content.encode()).hexdigest()[:32] for content in self.contents())
        return [io.below(folder, f"{name}{self.suffix}") for name in names]

    def is_complete(self, folder: Path) -> bool:
        return all(file.exists() for file in self.files(folder))


class TableMap(Map):
    """A map whose files are tables in Parquet."""

    suffix = ".parquet"

    @abstractmethod
    def table(self, item: int) -> pa.Table:
        """Compute the table of an item, the same in every process."""

    def write(self, item: int, file: Path) -> None:
        arrow()  # one message before the work where it is not installed
        from pyarrow import parquet

        table = self.table(item)
        with io.whole(file) as target:
            parquet.write_table(table, target, compression="zstd")

    def merged(self, folder: Path) -> pa.Table:
        """Return the tables of all items in their order."""
        from pyarrow import parquet

        return arrow().concat_tables([parquet.read_table(file, partitioning=None) for file in self.files(folder)])


def run_map(
    work: Map,
    folder: Path,
    on: str = "local",
    report: Callable[[int, int], None] = lambda done, total: None,
    *others: Map,
) -> int:
    """Write the missing files of maps into a folder that all processes share; return how many this process wrote.

    on: "local:N" computes in N processes of this machine ("local": one per core), "ray" in tasks of the cluster of
    RAY_ADDRESS or of this machine. With "torchrun" and "slurm" this process is one of several and computes its share.
    report: called with the finished and all items of a map of this process. Raises UnfinishedError in all but the last
    of several processes.
    """
    if (match := re.fullmatch(r"(local)(?::([1-9]\d{0,2}))?|torchrun|slurm|ray", on)) is None:
        raise ConfigError(f"--on {on}: give local, local:PROCESSES, torchrun, slurm or ray")
    io.make_folder(folder)
    rank, size = share_of_work(on) if on in ("torchrun", "slurm") else (0, 1)
    processes, written = int(match[2] or os.cpu_count() or 1) if match[1] else 1, 0
    for part in (work, *others):
        files = {file: item for item, file in enumerate(part.files(folder))}
        missing = [(item, file) for file, item in list(files.items())[rank::size] if not file.exists()]
        count = min(processes, len(missing) // part.least_items)
        done = _map_on_ray(part, missing) if on == "ray" else map_in_children(partial(_write, part), missing, count, 1)
        for number, _ in enumerate(done, start=1):
            report(number, len(missing))
        written += len(missing)
    if size > 1 and not all(part.is_complete(folder) for part in (work, *others)):
        raise UnfinishedError(f"--on {on}: other processes have not finished; the last one completes the command")
    return written


def _write(work: Map, task: Task) -> None:
    item, file = task
    # Ray repeats a task whose process was killed after it wrote the file.
    if not file.exists():
        work.write(item, file)


def _map_on_ray(work: Map, tasks: Sequence[Task]) -> Iterator[None]:
    """Write the files of all tasks by Ray, which repeats the tasks of killed processes."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = imported("ray", "--on ray needs", "ray")
    try:
        ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"--on ray: RAY_ADDRESS={os.environ.get('RAY_ADDRESS')}: {cause(error)}") from None
    shared, write = ray.put(work), ray.remote(num_gpus=work.gpus)(_write)
    try:
        for reference in [write.remote(shared, task) for task in tasks]:
            yield ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise TrainingError(f"--on ray: {first_line(error)}; the same command continues") from None


# Child processes, which end with the process that started them. They start fast: nothing here imports torch.


def bind_to_parent() -> None:
    """Call first in a child process: the kernel kills it as soon as its parent ends for any reason."""
    # Schedulers signal every process of a job: only the parent reacts.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # the parent ended before the line above


def map_in_children(
    function: Callable[[Argument], Result], arguments: Iterable[Argument], processes: int, chunk: int
) -> Iterator[Result]:
    """Yield `function(argument)` in order, computed by child processes, which end with the generator.

    processes: with fewer than two, this process computes the results. chunk: arguments that a process takes at a time.
    At most AHEAD chunks per process are computed ahead, to bound memory. A child has its number as LOCAL_RANK, and so
    its own GPU. Raises TrainingError if a process was killed.
    """
    if processes < 2:
        yield from map(function, arguments)
        return
    earlier_children = set(multiprocessing.active_children())
    # Spawned, not forked: this process may already use CUDA, NCCL and their threads.
    spawn = multiprocessing.get_context("spawn")
    try:
        begin = function, processes, spawn.Value("i", 0)
        executor = ProcessPoolExecutor(processes, spawn, initializer=_begin, initargs=begin)
    except OSError as error:
        raise TrainingError(f"child processes cannot be started ({error}): is /dev/shm full?") from error
    with executor as pool:
        try:
            remaining, pending = iter(arguments), deque[Future[list[Result]]]()
            while part := list(islice(remaining, chunk)):
                pending.append(pool.submit(_apply, part))
                if len(pending) > AHEAD * processes:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        except BaseException as error:
            # The pool would wait for the arguments that its processes have begun, and they ignore SIGTERM.
            for child in set(multiprocessing.active_children()) - earlier_children:
                child.kill()
            if isinstance(error, BrokenProcessPool):
                raise TrainingError("a child process was killed (out of memory?): use fewer processes") from None
            raise


def _begin(function: Callable[[Any], Any], processes: int, started: Any) -> None:
    bind_to_parent()
    with started.get_lock():
        # The parent, not the child, is the rank that prints.
        os.environ["RANK"] = "1"
        os.environ["LOCAL_RANK"] = str(started.value)
        os.environ["LOCAL_WORLD_SIZE"] = str(processes)
        started.value += 1
    _function.append(function)


def _apply(arguments: list[Any]) -> list[Any]:
    return [_function[0](argument) for argument in arguments]
