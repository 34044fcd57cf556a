"""Throughput of a training: samples per second, shares of a step's time, memory, FLOPs, slow ranks."""

from __future__ import annotations

import ctypes
import logging
import resource
import socket
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import count
from statistics import median_low
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from clipzoo.distributed.parallel import OWN_PASSES
from clipzoo.distributed.world import World, step_part
from clipzoo.encoders.base import caption_groups
from clipzoo.heads.pairs import Scope
from clipzoo.model import Model
from clipzoo.types import Batch, Features

T = TypeVar("T")
SHARES = {"data": "data_wait", "forward": "forward", "backward": "backward", "optimizer": "optimizer"}
"""Part of a step -> its name in metrics.jsonl, where it is a share of the time."""
EVALUATION = "evaluation"
START, CHECKPOINT = "start", "checkpoint"
PARTS = (*SHARES, "other", EVALUATION, START, CHECKPOINT)
"""Parts of a step, evaluations, the start of a process and checkpoints: together they are the whole time."""
OWN_WORK = {"data": "data", "transfer": "transfer", OWN_PASSES: "computation"}
"""Mark -> cause of the time before it, in which this rank does not wait for other ranks."""
BLOCKS = 4
"""Number of parts of the period. A slow rank is slow in all of them: one long pause does not count."""
CAUSE_TEXTS = {
    "data": "it waits for data: compare its disk, network and CPU cores with those of the other ranks",
    "transfer": "it waits for batches on their way to its device: compare its memory and the link to its device",
    "computation": "its computation is slow: compare clocks, temperature and other processes of its device",
    CHECKPOINT: "it waits for its checkpoint files: compare its disk",
}
CAUSES = tuple(CAUSE_TEXTS)
"""Causes of a rank's own time."""
PEAKS = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L40": 181e12,
    "A10G": 70e12, "A10": 125e12, "L4": 121e12, "4090": 165e12, "V100": 125e12, "T4": 65e12,
}  # fmt: skip
"""Part of a GPU's name -> its dense half-precision operations per second, from the vendors' data sheets."""
log = logging.getLogger(__name__)

Times = NDArray[np.float64]
Log = Callable[[int, Mapping[str, Any]], None]


class Throughput:
    """Measures a loop over `timed(batches)`; `mark(part)` ends a part of a step, or a phase inside a part.

    Seconds, rates and shares do not include evaluations. A GPU records events at the
    marks, so that the host does not wait for it.

    own: seconds and steps between the last two readings, and this rank's own seconds by cause (see OWN_WORK).
    flops_per_step: floating-point operations of this rank; None until they are counted.
    peak_flops: floating-point operations per second that its device is capable of; None if unknown.
    """

    flops_per_step: float | None = None
    peak_flops: float | None = None

    def __init__(self, total_steps: int, global_batch: int, world: World) -> None:
        self._total_steps, self._global_batch = total_steps, global_batch
        self._device, self._ranks, self._on_gpu = world.device, world.size, world.device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self._last = self._last_part = self._now()
        self._parts: dict[str, float] = {}
        self._own = dict.fromkeys(CAUSES, 0.0)
        self._started = time.perf_counter()
        self._first_step = 0
        self._reading = _Reading(0.0, 0, {}, self._own.copy())
        self.own = [0.0] * (2 + len(CAUSES))
        self._estimate_from = self._started, 0
        self._spent_before: dict[str, float] = {"seconds": 0.0, "steps": 0}
        self._joules = energy_meter(world.device)
        self._joules_before = self._joules() if self._joules else 0.0

    def resume(self, step: int, spent: Mapping[str, float]) -> None:
        """Continue at `step`. spent: `state` of the interrupted run."""
        self._first_step = step
        self._reading = self._reading._replace(step=step)
        self._estimate_from = self._started, step
        self._spent_before.update(spent)

    def state(self, step: int) -> dict[str, float]:
        """Return seconds of training and of each part, steps, and joules if known, of all processes of the run."""
        before, now = self._spent_before, self._measured(step)
        own = {**now.parts, **({"joules": self._joules() - self._joules_before} if self._joules else {})}
        parts = {name: before.get(name, 0.0) + value for name, value in own.items()}
        sums = {"seconds": before["seconds"] + now.seconds, "steps": before["steps"] + step - self._first_step}
        return {**before, **parts, **sums}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Assign the time of the block to a part. EVALUATION is not a part of the training."""
        self.mark("other")
        yield
        self.mark(name)

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches; the time that each one takes to arrive counts as waiting for data.

        Readings leave out the start-up: the wait for the first batch and, if other steps follow before the first
        reading, the first step.
        """
        iterator = iter(batches)
        for number in count():
            self.mark("other")
            if number == 1:
                self._leave_out_start(self._first_step + 1)
            try:
                with step_part("data"):
                    batch = next(iterator)
            except StopIteration:
                return
            self.mark("data")
            if number == 0:
                self._leave_out_start(self._first_step)
            yield batch

    def mark(self, part: str) -> None:
        """Assign the time since the last part to `part`; a phase inside a part does not begin a new part."""
        self._marks.append((part, self._now()))

    def add_own(self, cause: str, seconds: float) -> None:
        """Add own seconds of this rank that no mark measures."""
        self._own[cause] += seconds

    def read(self, step: int) -> dict[str, float]:
        """Return samples per second over all ranks and shares of the time since the last reading, and peak memory."""
        before, now = self._reading, self._measured(step)
        seconds, steps = max(now.seconds - before.seconds, 1e-9), step - before.step
        parts = {part: total - before.parts.get(part, 0.0) for part, total in now.parts.items()}
        self.own = [seconds, steps, *(now.own[cause] - before.own[cause] for cause in CAUSES)]
        self._reading = now
        return {
            **self._rates(steps, seconds, parts),
            "peak_memory_mib": self._peak_memory(),
            "seconds": self._spent_before["seconds"] + now.seconds,
        }

    def progress_line(self, step: int, values: Mapping[str, Any]) -> str:
        """Return the line that the terminal shows for a reading."""
        begin, first_step = self._estimate_from
        seconds_left = (time.perf_counter() - begin) / max(step - first_step, 1) * (self._total_steps - step)
        minutes, seconds = divmod(round(seconds_left), 60)
        hours, minutes = divmod(minutes, 60)
        return (
            f"step {step}/{self._total_steps}  epoch {values['epoch']:.2f}  loss {values['loss']:.4f}  "
            f"lr {values['lr']:.2e}  {values['samples_per_second']:.0f} samples/s  "
            f"data wait {values['data_wait']:.0%}  left "
            + (f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s")
        )

    def summary(self, step: int) -> dict[str, Any]:
        """Return the cost of the whole training, without interruptions, as results.json shows it."""
        state = self.state(step)
        seconds, steps = state["seconds"], state["steps"]
        return {
            "steps": step,
            "seconds": seconds,
            "evaluation_seconds": state.get(EVALUATION, 0.0),
            **self._rates(steps, seconds, state),
            **({} if self.flops_per_step is None else {"flops": self.flops_per_step * steps * self._ranks}),
            **({"energy_kwh": state["joules"] * self._ranks / 3.6e6} if "joules" in state else {}),
            "peak_memory_mib": self._peak_memory(),
            "ranks": self._ranks,
            "device": torch.cuda.get_device_name(self._device) if self._on_gpu else "CPU",
        }

    def _leave_out_start(self, step: int) -> None:
        """Begin the first reading, and the estimate of the time left, after `step` steps."""
        self._estimate_from = time.perf_counter(), step
        if self._reading.step == self._first_step:
            self._reading = self._measured(step)

    def _measured(self, step: int) -> _Reading:
        """Return the measurements since this process began. Waits until a GPU has reached the last mark."""
        if self._on_gpu and self._marks:
            self._marks[-1][1].synchronize()
        for part, end in self._marks:
            if part in OWN_WORK:
                self._own[OWN_WORK[part]] += self._between(self._last, end)
            if part in PARTS:
                self._parts[part] = self._parts.get(part, 0.0) + self._between(self._last_part, end)
                self._last_part = end
            self._last = end
        self._marks.clear()
        seconds = time.perf_counter() - self._started - self._parts.get(EVALUATION, 0.0)
        return _Reading(seconds, step, self._parts.copy(), self._own.copy())

    def _rates(self, steps: float, seconds: float, parts: Mapping[str, float]) -> dict[str, float]:
        """Return samples per second, shares of the time, and the model FLOPs utilization where the peak is known."""
        rates = {"samples_per_second": steps * self._global_batch / seconds}
        rates |= {name: parts.get(part, 0.0) / seconds for part, name in SHARES.items()}
        if self.flops_per_step is not None and self.peak_flops is not None:
            rates["flops_utilisation"] = self.flops_per_step * steps / seconds / self.peak_flops
        return rates

    def _peak_memory(self) -> float:
        if self._on_gpu:
            return torch.cuda.max_memory_allocated(self._device) / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1000 if self._on_gpu else end - begin


class _Reading(NamedTuple):
    """Seconds of training, steps, seconds of each part, and seconds of this rank by cause (see OWN_WORK)."""

    seconds: float
    step: int
    parts: Mapping[str, float]
    own: Mapping[str, float]


@dataclass(frozen=True)
class SlowRank:
    """A rank that was slower than the median of the ranks by the share `excess` for `seconds`, and the cause.

    own: seconds per step that the rank spent on the cause. median: median of these seconds over all ranks.
    """

    rank: int
    excess: float
    seconds: float
    cause: str
    own: float
    median: float

    def report(self, step: int, world: World, log_event: Log) -> None:
        """Name the rank and its host in the log and in metrics.jsonl, on the first rank. Collective."""
        host = world.gather_object(socket.gethostname())[self.rank]
        if not world.is_first:
            return
        log.warning(
            "rank %d on %s has been %.0f %% slower than the median of the ranks for %.0f seconds: %s (%.3g s a step, "
            "median %.3g s)",
            *(self.rank, host, 100 * self.excess, self.seconds, CAUSE_TEXTS[self.cause], self.own, self.median),
        )
        log_event(step, {"event": "slow_rank", "host": host, **asdict(self)})


class SlowRanks:
    """Finds slow ranks by the own times of all ranks, and returns each of them once.

    Times are [ranks, 2 + causes]: seconds and steps of a period, equal on all ranks, and own seconds by cause.
    threshold: share by which a slow rank's time exceeds the median of the ranks. period: seconds that it must last.
    """

    def __init__(self, threshold: float, period: float) -> None:
        self._threshold, self._period = threshold, period
        self._block: Times | float = 0.0
        self._slow: dict[int, Times] = {}
        self._found: set[int] = set()

    def judge(self, rows: Sequence[Sequence[float]]) -> tuple[dict[str, float], list[SlowRank]]:
        """Return the slowest rank of a reading and its excess, for the log line, and the new slow ranks.

        rows: `Throughput.own` of all ranks, in rank order. Equal rows give equal results on all ranks.
        """
        times = np.array(rows, dtype=np.float64)
        if len(rows) == 1 or times[0, 1] < 1:
            return {}, []
        excesses = _excesses(times)
        slowest = excesses.index(max(excesses))
        values = {"slowest_rank": slowest, "slowest_rank_excess": excesses[slowest]}
        block = times + self._block
        if block[0, 0] < self._period / BLOCKS:
            self._block = block
            return values, []
        self._block = 0.0
        slow = [rank for rank, excess in enumerate(_excesses(block)) if excess > self._threshold]
        self._slow = {rank: block + self._slow.get(rank, 0.0) for rank in slow}
        new = [rank for rank in slow if self._slow[rank][0, 0] >= self._period and rank not in self._found]
        self._found.update(new)
        slow_ranks = []
        for rank in new:
            times = self._slow[rank]
            seconds, steps = times[0, :2].tolist()
            # The cause is the rank's own phase that exceeds the median over ranks by most.
            medians = [median_low(column) for column in times[:, 2:].T.tolist()]
            index = int((times[rank, 2:] - medians).argmax())
            own_seconds, median = float(times[rank, 2 + index]) / steps, medians[index] / steps
            slow_ranks.append(SlowRank(rank, _excesses(times)[rank], seconds, CAUSES[index], own_seconds, median))
        return values, slow_ranks


def _excesses(times: Times) -> list[float]:
    """Return by how much each rank's time exceeds the median of the ranks, as a share of it."""
    own_seconds = times[:, 2:].sum(axis=1)
    totals = (own_seconds + max(times[0, 0] - own_seconds.max(), 0.0)).tolist()
    median = median_low(totals)
    return [total / median - 1 if median > 0 else 0.0 for total in totals]


def flops_per_step(model: Model, batch: Batch, world: World, tile: int | None) -> float:
    """Return the operations of this rank's share of a step: three times a forward pass of encoders and head.

    Gradients that the encoders do not compute do not count: gradients of images and of weights that do not train.
    Recomputed activations do not count, and neither do kernels that torch cannot count. Encoders are counted on two
    samples. tile: see Scope.
    """
    sample = batch.split(min(2, len(batch)))[0]
    buffers = {name: buffer.clone() for name, buffer in model.encoder.named_buffers()}
    flops, image = _count(model.image_read_by_head, sample.images, len(batch.images))
    for rows, width in caption_groups(batch.texts, batch.text_lengths):
        count, text = _count(model.text_read_by_head, sample.texts[..., :width], rows)
        flops += count

    def repeated(features: Features, size: int) -> Features:
        """Return the first sample's features, repeated for all samples of the batch."""
        mask = None if features.mask is None else features.mask[:1].expand(size, -1)
        return replace(features.map(lambda tensor: tensor[:1].detach().expand(size, *tensor.shape[1:])), mask=mask)

    with torch.no_grad(), FlopCounterMode(display=False) as head:
        similarity = model.compare(
            repeated(image, len(batch.images)), repeated(text, len(batch.texts)), Scope(world, tile, batch.views)
        )
        for scores in similarity.directions:
            scores.positives()
            scores.log_sum_exp()
    for name, buffer in model.encoder.named_buffers():
        buffer.copy_(buffers[name])
    return flops + 3.0 * head.get_total_flops()


def _count(encode: Callable[[Tensor], Features], view: Tensor, rows: int) -> tuple[float, Features]:
    """Return the operations of a step on `rows` samples like those of `view`, and the view's features."""
    formulas = {operator: _of_step(formula) for operator, formula in flop_registry.items()}
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter, torch.compiler.set_stance("force_eager"):
        features = encode(view)
    return counter.get_total_flops() * rows / len(view), features


def _of_step(formula: Callable[..., float]) -> Callable[..., float]:
    """Return the formula of an operator's forward and backward pass from that of the forward pass.

    The gradients of all operands take two forward passes; an operand without a gradient, such as the image in the first
    convolution or a weight that does not train, takes none.
    """

    def of_step(*arguments: Any, **options: Any) -> float:
        # Biases and masks are left out.
        operands = [tensor for tensor in arguments[:3] if isinstance(tensor, Tensor) and tensor.ndim > 1]
        share = sum(tensor.requires_grad for tensor in operands) / max(len(operands), 1)
        return formula(*arguments, **options) * (1 + 2 * share)

    # FlopCounterMode passes tensors, not their shapes.
    of_step._get_raw = True  # type: ignore[attr-defined]
    return of_step


def energy_meter(device: torch.device) -> Callable[[], float] | None:
    """Return a function that reads the joules of a GPU since its driver was loaded; None where NVML does not count."""
    if device.type != "cuda":
        return None
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    with suppress(OSError, AttributeError):  # no NVML, or an old one
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        read = partial(nvml.nvmlDeviceGetTotalEnergyConsumption, handle, ctypes.byref(millijoules))
        if not (nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)) or read()):
            return lambda: (read(), millijoules.value / 1000)[1]
    return None


@cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the operations per second of a GPU in this precision: from its data sheet, or measured.

    None for a CPU: its cores are shared with loaders and other programs, so that a measured rate is not a bound.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peaks = [peak for part, peak in PEAKS.items() if part in name]
    if peaks and dtype in (torch.bfloat16, torch.float16):
        return peaks[0]
    size = 8192
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / min(timeit.repeat(lambda: (left @ right)[0, 0].item(), number=1, repeat=5))
