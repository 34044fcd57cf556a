"""Check this machine before a training: `clipzoo doctor`. Every check is a process with a time limit."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from importlib import metadata, util
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from clipzoo import io
from clipzoo.errors import CHECKOUT, ConfigError, TrainingError, cause, first_names, number_of
from clipzoo.runs.store import Store

GOOD, DOUBTFUL, BROKEN = "good", "doubtful", "broken"
Line = tuple[str, str]
"""State and text."""
DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""CUDA's major version -> the oldest driver for it on Linux (NVIDIA, CUDA Toolkit release notes)."""


def doctor_arguments(parser: ArgumentParser) -> None:
    """Check GPU, kernels, ranks, shared memory, open files, clock, fonts and versions of this machine, and a store.

    clipzoo doctor
    clipzoo doctor --store s3://bucket/runs    also write, read and remove a small file in the store
    clipzoo doctor --runs /data/runs --json

    Each line is good, doubtful (with what to do) or broken. The exit code is 1 if a line is broken, otherwise 0.
    """
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=[], metavar="CHECK",
                        help=f"only these checks: {', '.join(CHECKS)}")  # fmt: skip
    parser.add_argument("--store", metavar="URL", help="store of runs to check")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="FOLDER",
                        help="folder of the runs, for the clock of its file system (default: runs)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=doctor)


def doctor(options: Namespace) -> None:
    if options.store:
        Store(options.store, "--store")  # raises ConfigError
    results = []
    for name in options.only or [name for name in CHECKS if name != "store" or options.store]:
        state, text = answer(partial(CHECKS[name][0], options), CHECKS[name][1])
        results.append({"check": name, "state": state, "text": text})
        if not options.json:
            width, line = shutil.get_terminal_size((100, 24)).columns, f"{state:<9} {name:<9} {text}"
            print(*textwrap.wrap(line, width, subsequent_indent=" " * 20, break_on_hyphens=False), sep="\n", flush=True)
    if options.json:
        print(json.dumps(results, indent=1))
    if any(result["state"] == BROKEN for result in results):
        sys.exit(1)


def answer(check: Callable[[], Line], seconds: int) -> Line:
    """Return the answer of a check from a forked process, which is killed with its children after `seconds`.

    A process that the kernel does not end, as on a dead network disk, is left behind.
    """
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.setsid()
        for descriptor in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        try:
            result = check()
        except Exception as error:
            result = BROKEN, str(error) if isinstance(error, ConfigError | TrainingError) else cause(error)
        os.write(writer, json.dumps([result[0], result[1][:600]]).encode())  # fewer bytes than PIPE_BUF: in one piece
        os._exit(0)
    os.close(writer)
    is_ready = select.select([reader], [], [], seconds)[0]
    content = os.read(reader, select.PIPE_BUF) if is_ready else b""
    os.close(reader)
    os.killpg(pid, signal.SIGKILL)
    fault = "the check has crashed, or ran out of memory" if is_ready else f"no answer within {seconds} s"
    state, text = json.loads(content) if content else (BROKEN, fault)
    return state, text


def gpu(options: Namespace) -> Line:
    """The GPUs and the driver that nvidia-smi names, and the CUDA of torch."""
    if (program := shutil.which("nvidia-smi")) is None:
        fault = "there is /dev/nvidia0, but no nvidia-smi: install the programs of the driver"
        return (BROKEN, fault) if Path("/dev/nvidia0").exists() else (GOOD, "none: trainings use the CPU")
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    asked = subprocess.run(query, capture_output=True, text=True)
    rows = asked.stdout.strip().splitlines()
    if asked.returncode or not rows:
        return BROKEN, f"nvidia-smi fails, reinstall the driver: {(asked.stdout + asked.stderr).strip()[:200]}"
    *_, driver = rows[0].split(", ")
    text = f"{number_of(len(rows), 'GPU')}, the first is {rows[0]} (driver)"
    # Without importing torch.
    place = Path(str(util.find_spec("torch").origin)).with_name("version.py")  # type: ignore[union-attr]
    cuda = re.search(r"^cuda\b.*= '(\d+)", io.read_text(place, io.MB), re.M)
    if cuda is None:
        return BROKEN, f"{text}, but torch is a build for CPUs: install one for CUDA"
    oldest = DRIVERS.get(int(cuda[1]), "0")
    if Version(driver) < Version(oldest):
        return BROKEN, f"{text}: torch for CUDA {cuda[1]} needs {oldest} or newer: update it, or install an older torch"
    return GOOD, f"{text}, torch for CUDA {cuda[1]}"


def kernels(options: Namespace) -> Line:
    """The kernels in fp32 against their slow twins in float64: values and gradients."""
    import torch
    from torch.nn.functional import normalize

    from clipzoo.ops import filip, kme, sums
    from clipzoo.ops.tiles import backend

    device, generator = "cuda" if torch.cuda.is_available() else "cpu", torch.Generator().manual_seed(0)
    images, texts = (normalize(torch.randn(40, count, 32, generator=generator), dim=-1) for count in (9, 7))

    masks = [torch.ones(sets.shape[:2], dtype=torch.bool) for sets in (images, texts)]

    def log_sum_exps(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = (left @ right.mT).masked_fill(torch.eye(len(left), dtype=torch.bool), -torch.inf)
        return scores.logsumexp(1), scores.logsumexp(0)

    cases: dict[str, tuple[Callable, Callable, list[torch.Tensor]]] = {
        "kme": (kme.kme_score, kme.kme_score_reference,
                [images, images[..., 0], texts, texts[..., 0], torch.tensor(7.0)]),
        "filip": (filip.filip_scores, filip.filip_scores_reference, [images, masks[0], texts, masks[1]]),
        "sums": (lambda x, y: sums.log_sum_exps(x, y, 0, 32), log_sum_exps, [3 * images[:, 0], texts[:, 0]]),
    }  # fmt: skip
    errors = {}
    for name, (fast, slow, inputs) in cases.items():
        answers = []
        for function, kind, place in ((fast, torch.float32, device), (slow, torch.float64, "cpu")):
            moved = [tensor.to(place, kind if tensor.is_floating_point() else None).detach() for tensor in inputs]
            leaves = [tensor.requires_grad_() for tensor in moved if tensor.is_floating_point()]
            values = torch.stack([*function(*moved)])
            gradients = torch.autograd.grad(values.sin().sum(), leaves)
            answers.append([tensor.detach().double().cpu() for tensor in (values, *gradients)])
        pairs = zip(*answers, strict=True)
        errors[name] = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
    path = f"{backend('sums', device, torch.float32).__name__.rpartition('.')[2]} and others on the {device.upper()}"
    if wrong := [f"{name} {error:.1e}" for name, error in errors.items() if not error < 1e-4]:
        return BROKEN, f"{path}: relative errors against float64: {', '.join(wrong)}: report this"
    untested = "" if device == "cuda" else "; Triton's kernels need a GPU and were not tested"
    return GOOD, f"{path}: {', '.join(errors)} equal float64 to {max(errors.values()):.0e}{untested}"


def ranks(options: Namespace) -> Line:
    """A ring of real processes: one for each GPU with NCCL, or two with gloo."""
    import torch

    count = torch.cuda.device_count()
    size, backend = (count, "nccl") if count > 1 else (2, "gloo")
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(size) as pool:
        rate = min(pool.starmap(_all_reduce, [(rank, size, backend, folder) for rank in range(size)], 1))
    text = f"{backend}, {size} processes: all-reduce at {rate:.2f} GB/s"
    advice = "look for the link that it takes: NCCL_DEBUG=INFO, GLOO_SOCKET_IFNAME"
    return (GOOD, text) if rate >= {"nccl": 5.0, "gloo": 0.05}[backend] else (DOUBTFUL, f"{text}, {advice}")


def _all_reduce(rank: int, size: int, backend: str, folder: str, repeats: int = 4) -> float:
    """Sum 64 MiB over the ranks; return the GB/s of a link of the ring. Raises TrainingError for a wrong sum."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    wait = timedelta(seconds=60)
    dist.init_process_group(backend, init_method=f"file://{folder}/ring", rank=rank, world_size=size, timeout=wait)
    values, begin = torch.ones(2**24, device=device), 0.0
    for repeat in range(1 + repeats):
        begin = time.perf_counter() if repeat == 1 else begin  # the first one connects the ranks
        dist.all_reduce(values)
        if not (values == size ** (1.0 + repeat)).all():  # waits for a GPU
            raise TrainingError(f"{backend}: rank {rank} has a wrong sum")
    seconds = time.perf_counter() - begin
    dist.destroy_process_group()
    return 2 * (size - 1) / size * values.numel() * 4 * repeats / seconds / 1e9


def shared_memory(options: Namespace) -> Line:
    """Space for the batches that loader processes hand over."""
    size, _, free = (count // 2**20 for count in shutil.disk_usage("/dev/shm"))
    text = f"/dev/shm has {free:,} MiB free of {size:,}"
    advice = "mount -o remount,size=8g /dev/shm, for a container --shm-size=8g, or data.workers=0"
    if free < 64:
        return BROKEN, f"{text}, it is full: remove files that dead processes left in it; {advice}"
    return (GOOD, text) if free >= 1024 else (DOUBTFUL, f"{text}, little for loader processes: {advice}")


def open_files(options: Namespace) -> Line:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft:,} open files, at most {hard:,}"
    advice = f"{text}: loader processes and stores may need more: ulimit -n {min(hard % 2**63, 65536)}"
    return (GOOD, text) if soft >= 4096 else (DOUBTFUL if soft >= 256 else BROKEN, advice)


def clock(options: Namespace) -> Line:
    """This machine's clock against that of the file system of the runs, and against the time of this file."""
    runs, written = options.runs.absolute(), Path(__file__).stat().st_mtime
    folder = next(path for path in (runs, *runs.parents) if path.is_dir())
    with tempfile.TemporaryFile(dir=folder if os.access(folder, os.W_OK) else None) as file:
        off = abs(time.time() - os.fstat(file.fileno()).st_mtime)
    text = f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}, {off:.1f} s from new files in {folder}"
    remedy = "timedatectl set-ntp true: stores refuse wrong clocks, and states of runs depend on it"
    if time.time() < written - 86400:
        return BROKEN, f"{text}, but clipzoo is of {time.strftime('%Y-%m-%d', time.gmtime(written))}: {remedy}"
    return (GOOD, text) if off < 5 else (DOUBTFUL if off < 600 else BROKEN, f"{text}: {remedy}")


def store(options: Namespace) -> Line:
    """Write, read and remove a file, with the credentials of the environment."""
    if (url := options.store) is None:
        return DOUBTFUL, "give --store URL"
    folder, name, begin = Store(url, "--store", patience=3.0), f".doctor-{os.getpid()}", time.monotonic()
    folder.require(lambda: folder.write(name, b"clipzoo"))
    content = folder.require(lambda: folder.read(name))
    folder.require(lambda: folder.remove(name))
    if content != b"clipzoo":
        return BROKEN, f"{url} returned {io.shortened(content)} in place of the content of a file"
    return GOOD, f"{url}: a file was written, read and removed in {time.monotonic() - begin:.1f} s"


def fonts(options: Namespace) -> Line:
    """Fonts of the report's pictures."""
    from clipzoo.io.text import family_with, script_of

    scripts = {script_of(letter): family_with(letter) for letter in "éд中の한عאअก"}
    if missing := [script for script, family in scripts.items() if family is None]:
        text = f"none for {', '.join(missing)}: pictures show [{missing[0]}] for such captions: install fonts-noto"
        return BROKEN if "Latin" in missing else DOUBTFUL, text
    return GOOD, f"for {', '.join(scripts)}"


def versions(options: Namespace) -> Line:
    """Installed packages against the requirements of clipzoo, and in a checkout against those of its tests."""
    installed = {canonicalize_name(part.name): Version(part.version) for part in reversed([*metadata.distributions()])}

    def wrong(lines: Sequence[str]) -> Iterator[str]:
        for needed in map(Requirement, lines):
            version = installed.get(canonicalize_name(needed.name))
            is_needed = needed.marker is None or needed.marker.evaluate({"extra": ""})
            if is_needed and (version is None or version not in needed.specifier):
                yield f"{needed.name} is {version or 'missing'}, not {needed.specifier}"

    if broken := [*wrong(metadata.requires("clipzoo") or [])]:
        return BROKEN, f"{first_names(broken, 8)}: pip install -U them"
    constraints = CHECKOUT / "constraints.txt"
    tested = re.findall(r"^[\w.-]+==\S+$", io.read_text(constraints, io.MB), re.M) if constraints.exists() else []
    differ = [part for part in wrong(tested) if "missing" not in part]
    text = f"; the tests ran with other versions: {first_names(differ)}" if differ else ""
    return GOOD, f"Python {sys.version.split()[0]}, requirements are met{text}"


CHECKS: dict[str, tuple[Callable[[Namespace], Line], int]] = {
    "GPU": (gpu, 10), "kernels": (kernels, 180), "ranks": (ranks, 90), "memory": (shared_memory, 5),
    "files": (open_files, 5), "clock": (clock, 10), "store": (store, 20), "fonts": (fonts, 60),
    "versions": (versions, 20),
}  # fmt: skip
"""Checks by name, and their time limits in seconds."""
