"""Parts of the benchmark of a GPU: the machine, training steps, scores, the linear probe and the loader."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import ops
from benchmarks.heads import HEADS, Contender, contender
from benchmarks.loader import photographs
from benchmarks.loader_process import our_data
from benchmarks.measurement import PRODUCTS, Recorder, Run, extra_mib, seconds, wait_for, whole_mib
from benchmarks.probe import features as probe_features
from clipzoo import ConfigError, World
from clipzoo.build import build_part
from clipzoo.config.compose import compose
from clipzoo.data.tokenizer import ClipTokenizer
from clipzoo.distributed.launch import loader_workers
from clipzoo.evaluation.logistic import TOLERANCE, LogisticRegression, Solution
from clipzoo.evaluation.probe import LabelledFeatures, accuracies, search as probe_search
from clipzoo.evaluation.scoring import exact_products
from clipzoo.lab import twin
from clipzoo.lab.worlds.world import WorldParameters, ensure_world
from clipzoo.training import checkpoint_files
from clipzoo.training.parts import Dataset
from clipzoo.training.settings import MATMUL_PRECISIONS, Computation, Precision

REPEATS = 3
PACKAGES = ("torch", "triton", "open_clip_torch", "timm", "numpy")


def machine(recorder: Recorder) -> None:
    """The device, its software, and the rates that bound every other number."""
    recorder.add("machine", "device", _facts(recorder.device))
    size = 256 if recorder.small else 8192
    for name, dtype, precision in (
        ("bf16", torch.bfloat16, "highest"), ("TF32", torch.float32, "high"), ("fp32", torch.float32, "highest"),
    ):  # fmt: skip
        recorder.measure(
            "rates", f"matrix product {size} x {size} x {size}, {name}",
            partial(_product, recorder.device, size, dtype, precision),
        )  # fmt: skip
    mib = 8 if recorder.small else 2048
    recorder.measure("rates", f"copy of {mib} MiB on the device", partial(_copy, recorder.device, mib))
    if recorder.device.type == "cuda":
        recorder.measure("rates", f"copy of {mib} MiB from pinned memory", partial(_copy, recorder.device, mib, True))


def _facts(device: torch.device) -> dict[str, Any]:
    facts = {"device": f"CPU, {torch.get_num_threads()} threads"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts = {
            "device": torch.cuda.get_device_name(device), "memory": f"{properties.total_memory / 2**30:.0f} GiB",
            "compute capability": f"{properties.major}.{properties.minor}", "CUDA": str(torch.version.cuda),
        }  # fmt: skip
    facts["host"] = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    facts["Python"] = platform.python_version()
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            facts[package] = importlib.metadata.version(package)
    return facts


def _product(device: torch.device, size: int, dtype: torch.dtype, precision: str) -> dict[str, float]:
    torch.set_float32_matmul_precision(precision)
    # Random numbers: zeros take less power, and so are faster.
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    shortest = min(seconds(lambda: left @ right, device) for _ in range(REPEATS + 1))
    return {"tflops": 2 * size**3 / max(shortest, 1e-9) / 1e12}


def _copy(device: torch.device, mib: int, from_host: bool = False) -> dict[str, float]:
    """A copy on the device counts bytes read and bytes written."""
    target = torch.empty(mib << 20, dtype=torch.uint8, device=device)
    source = torch.empty(mib << 20, dtype=torch.uint8, pin_memory=True) if from_host else torch.ones_like(target)
    shortest = min(seconds(lambda: target.copy_(source), device) for _ in range(REPEATS + 1))
    return {"gigabytes_per_second": (1 if from_host else 2) * (mib << 20) / max(shortest, 1e-9) / 1e9}


WITHOUT_PADDING = ("clip", "kme-captions", "open_clip")
"""Contenders whose captions of 12 tokens are compared; of those, clipzoo's leave out the padding."""


def heads(recorder: Recorder) -> None:
    """The steps of all heads, micro-batches on a GPU; open_clip's first, to which the others are compared."""
    batch, micro_batch = (8, None) if recorder.small else (2048, 256)
    ordered = ["open_clip", "clip", *(name for name in HEADS if name not in ("open_clip", "clip"))]
    for table, names, tokens in (("heads", ordered, None), ("captions", WITHOUT_PADDING, 12)):
        for name in names:
            options = step_options(recorder, batch=batch, micro_batch=micro_batch, caption_tokens=tokens)
            recorder.measure(table, name, partial(_step_row, name, options, recorder))


def compiled(recorder: Recorder) -> None:
    """The steps of CLIP's head and of open_clip without and with torch.compile, of ours also of the whole step."""
    cases: dict[str, tuple[str, bool | str]] = {
        "clip, eager": ("clip", False), "open_clip, eager": ("open_clip", False), "clip, compiled": ("clip", True),
        "open_clip, compiled": ("open_clip", True), "clip, compiled step": ("clip", "step"),
    }  # fmt: skip
    for title, (name, compile) in cases.items():
        options = step_options(recorder, batch=8 if recorder.small else 256, compile=compile)
        recorder.measure("compile", title, partial(_step_row, name, options, recorder))


def determinism(recorder: Recorder) -> None:
    """Weights of a deterministic training, of the same again, and of one that is killed and resumed, bit for bit."""
    batch, steps, samples = (8, 8, 32) if recorder.small else (256, 24, 1024)
    encoder = "tiny" if recorder.small else "vit_b16"
    with tempfile.TemporaryDirectory() as folder:
        shards = photographs(Path(folder), 400, 300, samples)
        command = [
            sys.executable, "-m", "clipzoo.cli", "train", f"encoder={encoder}", f"data.shards='{shards}'", "eval=none",
            f"runs={folder}/runs", f"trainer.global_batch={batch}", "trainer.epochs=null", f"trainer.steps={steps}",
            f"trainer.device={recorder.device}", f"trainer.checkpoints.every={steps // 4}",
            "trainer.checkpoints.in_background=false", "trainer.deterministic=true",
        ]  # fmt: skip

        def trained(name: str, killed: bool = False) -> dict[str, torch.Tensor]:
            run, checkpoints = [*command, f"name={name}"], Path(folder) / "runs" / name / "checkpoints"
            if killed:
                process = subprocess.Popen(run, stderr=subprocess.DEVNULL)
                while process.poll() is None and not any(checkpoints.glob("step_*.json")):
                    time.sleep(0.01)
                process.kill()
                process.wait()
            subprocess.run(run, check=True)
            state, *_ = checkpoint_files.load_newest(checkpoints) or ({},)
            return dict(state["model"])

        first = trained("first")

        def compared(name: str, killed: bool) -> dict[str, Any]:
            other = trained(name, killed)
            different = [name for name, value in first.items() if not torch.equal(value, other[name])]
            return {"proved": not different, "tensors": len(first), "different": len(different), "steps": steps}

        for title, killed in (("the same command again", False), ("killed and resumed", True)):
            recorder.measure("determinism", title, partial(compared, title.replace(" ", "_"), killed))


def twin_in_bf16(recorder: Recorder) -> None:
    """Losses of open_clip's `train_one_epoch` and of `clipzoo.train` in bf16, from equal weights on equal batches."""
    samples, batch, steps = (64, 8, 4) if recorder.small else (512, 32, 200)
    case = replace(
        twin.CASES["vit"],
        flags=[*twin.CASES["vit"].flags, "--precision", "amp_bf16", "--device", recorder.device.type],
    )
    world = World(device=recorder.device)

    def curves(precision: Precision) -> dict[str, Any]:
        flags = case.flags if precision == "bf16" else [*case.flags, "--precision", "fp32"]
        both = twin.train_both(replace(case, flags=flags), precision, plain, dataset, batches, world)
        losses = {side: both[side]["loss"] for side in ("clipzoo", twin.OPEN_CLIP)}
        differences = twin.relative(*losses.values())
        return {
            "first": float(differences[0]), "tenth": float(differences[:10].max()), "all": float(differences.max()),
            "steps": len(batches), **losses,
        }  # fmt: skip

    with tempfile.TemporaryDirectory() as folder:
        scenes = WorldParameters(train=samples, shard=samples // 4, probe=8, test=8, scenes=8, composition=0)
        ensure_world(Path(folder) / "scenes", scenes, 1, lambda done, total: None)
        plain = compose([*case.all_overrides, f"data.shards='{folder}/scenes/train'"])
        dataset = build_part(plain["data"], kind=Dataset)
        dataset.open(None, World())
        drawn = dataset.batches(
            seed=0, global_batch=batch, world=World(), start_step=0, stop_step=steps, trim_text=False
        )
        batches = list(drawn)
        for precision in ("float32", "bf16"):
            recorder.measure("twin", precision, partial(curves, precision))


def float8(recorder: Recorder) -> None:
    """The step of CLIP's head with timm's ViT in bf16 and with linear layers in float8, compiled."""
    for precision in ("bf16", "fp8"):
        encoder = {"encoder": "tiny" if recorder.small else "vit_b16", "compile": not recorder.small}
        options = step_options(recorder, batch=8 if recorder.small else 256, precision=precision, **encoder)
        try:
            Computation(precision).resolved(None, World(device=recorder.device))
        except ConfigError as error:
            recorder.add("fp8", precision, {"left_out": str(error)})
            continue
        recorder.measure("fp8", precision, partial(_step_row, "clip", options, recorder))


def open_clip_main(recorder: Recorder) -> None:
    """The step of open_clip's main branch, of which a checkout comes first on the path of this process."""
    if "OPEN_CLIP_MAIN" not in os.environ:
        return recorder.add("open_clip_main", "open_clip main", {"left_out": "give --open-clip-main CHECKOUT"})
    import open_clip

    assert str(open_clip.__file__).startswith(os.environ["OPEN_CLIP_MAIN"]), open_clip.__file__
    for compile in (False,) if recorder.small else (False, True):
        options = step_options(recorder, batch=8 if recorder.small else 256, compile=compile)
        title = f"open_clip main {open_clip.__version__}, {'compiled' if compile else 'eager'}"
        recorder.measure("open_clip_main", title, partial(_step_row, "open_clip", options, recorder))


def step_options(recorder: Recorder, **changes: Any) -> Namespace:
    """Options of `benchmark_heads.contender`."""
    on_gpu = recorder.device.type == "cuda"
    options = {
        "encoder": "tiny" if recorder.small else "clip_vit_b16", "micro_batch": None, "caption_tokens": None,
        "precision": "bf16" if on_gpu else "float32", "compile": False,
    }  # fmt: skip
    return Namespace(**{**options, **changes})


def _step_row(name: str, options: Namespace, recorder: Recorder) -> dict[str, Any]:
    """Median, range and peak memory of a few steps after two that warm up, the first of which compiles."""
    torch.set_float32_matmul_precision(MATMUL_PRECISIONS["bf16"])
    built: list[Contender] = []
    first: list[float] = []

    def build() -> Run:
        built.append(contender(name, options, recorder.device))
        return lambda: first.append(_timed(recorder, built[0].step)[1])

    mib = whole_mib(build, recorder.device) if recorder.device.type == "cuda" else None
    if mib is None:
        build()()
    readings = [seconds(built[0].step, recorder.device) for _ in range(2 if recorder.small else REPEATS)]
    taken, tflop = statistics.median(readings), built[0].flops() / 1e12
    return {
        "batch": options.batch, "micro_batch": options.micro_batch, "caption_tokens": options.caption_tokens,
        "encoder": options.encoder, "precision": options.precision, "seconds": taken, "readings": readings,
        "first_seconds": first[0], "peak_mib": mib, "tflop": tflop, "tflops": tflop / taken,
    }  # fmt: skip


WIDTH = 512


Case = tuple[str, str, Callable[[], dict[str, Run]], tuple[str, ...], float]
"""Table, title, function that returns contenders, those to measure, and floating-point operations."""


def scores(recorder: Recorder) -> None:
    """Only objectives and scores: tiles compared with the matrix and with open_clip's losses."""
    torch.set_default_device(recorder.device)
    for products in ("tf32", "bf16"):
        torch.set_float32_matmul_precision(PRODUCTS[products])
        for table, title, build, names, flop in _cases(recorder.small):
            try:
                contenders = build()
            except Exception:
                recorder.measure(table, f"{title}, {products} products", build)  # fails again, for its row
                continue
            # If one contender runs out of memory, measure the others.
            for name in names:
                facts = {"case": title, "products": products, "contender": name}
                times = partial(_times, recorder, contenders[name], flop, facts)
                recorder.measure(table, f"{title}, {products} products, {name}", times)


def _cases(small: bool) -> Iterator[Case]:
    samples = 96 if small else 32_768
    of_objective = partial(ops.objective_contenders, samples=samples, width=WIDTH)
    three, flop = ("clipzoo", "open_clip", "matrix"), 6.0 * samples**2 * WIDTH
    for title, name, peers in (
        ("InfoNCE", "infonce", ops.vector_contenders), ("SigLIP", "siglip", ops.siglip_contenders),
    ):  # fmt: skip

        def build(name: str = name, peers: Callable[..., dict[str, Run]] = peers) -> dict[str, Run]:
            return {**of_objective(name), **peers(samples, WIDTH)}

        yield "objectives", f"{title}, N = {samples}", build, three, flop
    yield "objectives", f"NUCLR, N = {samples}", partial(of_objective, "nuclr"), ("clipzoo", "matrix"), flop

    # Samples, image points, text points, of which valid, width; the naive form only fits where there are few samples.
    # Compiled forms take long to compile. A product of the scores and two of their gradient.
    large = [(64, 197, 77, 77, WIDTH), (2048, 197, 77, 12, WIDTH), (2048, 197, 77, 77, WIDTH)]
    for sets, points, others, valid, width in [(6, 5, 4, 3, 16)] if small else large:
        kme = partial(ops.kme_contenders, sets, points, others, width, valid, 7.14)
        names = ("clipzoo", "naive") if sets <= 64 else ("clipzoo",)
        flop = 6.0 * sets**2 * points * valid * width
        yield "scores", f"KME, N = {sets}, {points} x {valid} points", kme, names, flop
    # A product for the angles, again in the gradient, and one of the gradient.
    samples, points, width, count = (4, 5, 16, 32) if small else (2048, 197, WIDTH, 1024)
    waves = partial(ops.wave_contenders, samples, points, width, count)
    title = f"WPSE's features, {samples} x {points} points, D = {count}"
    yield "scores", title, waves, ("clipzoo", "naive"), 4.0 * samples * points * width * count


def _times(recorder: Recorder, run: Run, flop: float, facts: dict[str, str]) -> dict[str, Any]:
    """Median of a few runs, forward and backward, and the peak memory without the inputs."""
    device = recorder.device
    autocast = facts["contender"] == "open_clip" and facts["products"] == "bf16"

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            run()

    mib = extra_mib(step, device) if device.type == "cuda" else None
    step()
    readings = [seconds(step, device) for _ in range(2 if recorder.small else REPEATS)]
    taken = statistics.median(readings)
    return {
        **facts, "seconds": taken, "readings": readings, "extra_mib": mib, "tflops": flop / max(taken, 1e-9) / 1e12,
    }  # fmt: skip


class _TimeIsUp(Exception):  # noqa: N818
    pass


class _Timed(LogisticRegression):
    """Adds a row for each value of C that is solved. Raises _TimeIsUp when the part's time is used up."""

    recorder: Recorder
    seconds = 0.0
    values = 0

    def solve(self, c: float, limit: int = 1000, tolerance: float = TOLERANCE) -> Solution:
        if self.recorder.seconds_left <= 0:
            raise _TimeIsUp
        solution, taken = _timed(self.recorder, lambda: super(_Timed, self).solve(c, limit, tolerance))
        self.seconds, self.values = self.seconds + taken, self.values + 1
        values = {"C": c, "seconds": taken, "iterations": solution.iterations, "converged": solution.converged}
        self.recorder.add("probe_values", f"C = {c:.3g}", values)
        return solution


def probe(recorder: Recorder) -> None:
    """The linear probe's search for C at the size of ImageNet, on features made on the device."""
    samples, width, classes = (600, 16, 5) if recorder.small else (1_281_167, 512, 1000)
    options = Namespace(samples=samples, width=width, classes=classes, noise=2.5, device=recorder.device)
    with exact_products():
        recorder.measure("probe", f"{samples} x {width}, {classes} classes", lambda: _search(recorder, options))


def _search(recorder: Recorder, options: Namespace) -> dict[str, Any]:
    train, spent = _timed(recorder, lambda: probe_features(options, seed=1))
    validation = probe_features(options, seed=2, samples=options.samples // 25)
    if recorder.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model, prepared = _timed(recorder, lambda: _Timed(train.features, train.labels, options.classes))
    model.recorder = recorder
    try:
        scores = probe_search(model, validation, options.classes, "top1", "probe")
    except _TimeIsUp:
        return {"left_out": f"the time was used up after {model.values} values of C ({model.seconds:.0f} s)"}
    best = min(scores, key=lambda c: (-scores[c], c))
    peak = torch.cuda.max_memory_allocated() / 2**20 if recorder.device.type == "cuda" else None
    solution = LogisticRegression.solve(model, best)
    top1 = accuracies(solution.logits(validation.features), validation.labels)["top1"]
    return {
        "values_of_C": model.values, "chosen": best, "making_features_seconds": spent, "preparation_seconds": prepared,
        "search_seconds": model.seconds, "top1": top1,
        "converged": solution.converged, "remaining_gradient": _remaining_gradient(solution, train, best),
        "peak_mib": peak,
    }  # fmt: skip


def _remaining_gradient(solution: Solution, train: LabelledFeatures, c: float) -> float:
    """Norm of the gradient of scikit-learn's objective in float64, relative to its norm at zero weights."""
    norms = []
    for factor in (1, 0):
        weight, bias = factor * solution.weight, factor * solution.bias
        gradient = torch.cat([weight, torch.zeros_like(bias)[None]])  # [d + 1, k], the bias last
        for rows, labels in zip(train.features.split(1 << 16), train.labels.split(1 << 16), strict=True):
            rows = rows.double()
            residual = torch.addmm(bias, rows, weight).softmax(dim=1)
            residual[torch.arange(len(labels), device=labels.device), labels] -= 1
            gradient += c * torch.cat([rows.mT @ residual, residual.sum(dim=0)[None]])
        norms.append(gradient.norm())
    return float(norms[0] / norms[1])


def _timed(recorder: Recorder, function: Any) -> tuple[Any, float]:
    wait_for(recorder.device)
    begin = time.perf_counter()
    result = function()
    wait_for(recorder.device)
    return result, time.perf_counter() - begin


MANY = 10**9


def loader(recorder: Recorder) -> None:
    """How much of the loading a training hides: photographs of 400 x 300, random resized crops, CLIP's step."""
    device, small = recorder.device, recorder.small
    size, steps, samples = (8, 4, 32) if small else (256, 48, 1024)
    workers = 1 if small else loader_workers(device.type == "cuda")
    options = step_options(recorder, batch=size)
    encoder = compose([f"encoder={options.encoder}", "head=clip", "data.shards=none"])["encoder"]
    torch.set_float32_matmul_precision("medium")
    step = contender("clip", options, device).step
    with tempfile.TemporaryDirectory() as folder:
        loading = SimpleNamespace(
            shards=photographs(Path(folder), 400, 300, samples), image_size=encoder["image_size"],
            crop_scale=[0.5, 1.0], decode="exact", workers=workers,
        )  # fmt: skip
        data = our_data(loading, ClipTokenizer(encoder["context_length"]))
        batches: Any = data.batches(
            seed=0, global_batch=size, world=World(), start_step=0, stop_step=MANY, trim_text=True
        )
        resident = next(batches).to(device)
        ahead = 2 * workers  # batches that the workers prepare while something else is measured
        parts: dict[str, tuple[Run, int]] = {
            "step, batch on the device": (lambda: step(resident), 2),
            "loader alone": (lambda: next(batches), ahead),
            "loader and step": (lambda: step(next(batches).to(device)), ahead),
        }
        if device.type == "cuda":
            pinned = resident.map(lambda tensor: tensor.cpu()).pin_memory()
            parts["copy of a pinned batch to the device"] = (lambda: pinned.to(device), 1)
        times: dict[str, float] = {}

        def row(name: str) -> dict[str, float]:
            run, warm_up = parts[name]
            for _ in range(warm_up):
                run()
            _, taken = _timed(recorder, lambda: [run() for _ in range(steps)])
            times[name] = taken / steps
            return {"seconds": times[name], "samples_per_second": size / times[name]}

        for name in parts:
            recorder.measure("loader", name, partial(row, name))
        batches.close()
    if len(times) == len(parts):
        alone, only_loader, both, *_ = times.values()
        hidden = (alone + only_loader - both) / min(alone, only_loader)
        facts = {"workers": workers, "hidden": max(0.0, min(1.0, hidden)), "batch": size, "encoder": options.encoder}
        recorder.add("overlap", "hidden share of the shorter of the two", facts)
