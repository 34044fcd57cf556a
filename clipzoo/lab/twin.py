"""Compare two trainings step by step: open_clip's program and ours, or two runs of clipzoo.

clipzoo twin open_clip                      all cases, in float32 and float64, on 1 and 2 ranks
clipzoo twin open_clip --cases vit resnet --ranks 1 --steps 50
clipzoo twin runs/a runs/b                  two revisions, machines or settings: the first step and tensor that differ

The exit code is 1 if a case that must agree exceeds its bound, or if two runs differ.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import shlex
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clipzoo import io
from clipzoo.build import build_model, build_objective, build_part
from clipzoo.cli.arguments import Progress as ProgressLines, number_in, output_folder, refuse
from clipzoo.config.compose import compose
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError, TrainingError, number_of
from clipzoo.exports.hub import export
from clipzoo.io.weights import checkpoints_in, step_of
from clipzoo.lab.worlds.world import WorldParameters, ensure_world
from clipzoo.loading import PAIR, LoadedModel
from clipzoo.report.figures import colour, label, tiles
from clipzoo.report.render import Cell, Picture, Section, Span, Text, terminal, text_table, write
from clipzoo.runs.directory import config_of, is_finished
from clipzoo.runs.identity import flat
from clipzoo.runs.record import RunRecord, TrainingLog, revision
from clipzoo.runs.remote import local_copy
from clipzoo.training.checkpoint_files import name_of, read, tensors_with_paths
from clipzoo.training.checkpoints import MODEL
from clipzoo.training.loggers import quiet_libraries
from clipzoo.training.optimizers import AdamW
from clipzoo.training.parts import Dataset
from clipzoo.training.schedules import Cosine
from clipzoo.training.settings import Computation, Precision
from clipzoo.training.train import train
from clipzoo.types import Batch, Count, NonNegative

OPEN_CLIP = "open_clip"
VALUES = ("loss", "gradient_norm", "temperature")
"""Compared values of a step: the gradient norm before clipping, the temperature after the step."""
BOUNDS = {"float32": 1e-6, "float64": 1e-12}
"""Largest relative difference of the losses of a step, by precision."""
PAGES = "index.html", "twin.md"
SETTINGS = io.read_yaml(Path(__file__).with_suffix(".yaml"))
Curves = dict[str, list[float]]
"""Values of all steps by name."""


@dataclass(frozen=True)
class Case:
    """A training that both programs run; twin.yaml documents its fields."""

    flags: Sequence[str]
    overrides: Sequence[str] = ()
    frozen_norms: bool = False
    divides: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def all_flags(self) -> list[str]:
        return [*SETTINGS["flags"], *self.flags]

    @property
    def all_overrides(self) -> list[str]:
        return [*SETTINGS["overrides"], *(SETTINGS["resnet"] if "RN50" in self.flags else ()), *self.overrides]


CASES = {name: Case(**node) for name, node in SETTINGS["cases"].items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, peer = parser.add_argument, f"with {OPEN_CLIP}"
    add("sides", nargs="+", metavar="SIDE", help=f"{OPEN_CLIP}, or two run directories")
    add("--output", type=output_folder, help="folder of the page (default: runs/twin/open_clip, or twin/A-B next to A)")
    add("--steps", type=number_in(Count), default=200, help=f"{peer}: number of steps (default: %(default)s)")
    add("--batch", type=number_in(Count), default=32, help=f"{peer}: global batch size (default: %(default)s)")
    add("--shards", help=f"{peer}: training shards (default: 512 generated scenes)")
    add("--cases", nargs="+", choices=CASES, default=list(CASES), help=f"{peer} (default: all)")
    add("--precisions", nargs="+", choices=BOUNDS, default=list(BOUNDS), help=f"{peer} (default: both)")
    add("--ranks", nargs="+", type=number_in(Count), default=[1, 2], help=f"{peer} (default: 1 2)")
    tolerance = "with two runs: largest relative difference of equal values (default: 0)"
    add("--tolerance", type=number_in(NonNegative), default=0.0, help=tolerance)
    parser.set_defaults(run=run)


def run(options: Namespace) -> None:
    """Train the cases in both programs, or compare two runs, and write the page.

    Raises TrainingError if a case that must agree does not, or if the runs differ by more than the tolerance.
    """
    if options.sides == [OPEN_CLIP]:
        refuse(options, ["--tolerance"], "is for two runs")
        if options.batch % (parts := 4 * math.lcm(*options.ranks)):
            raise ConfigError(f"--batch {options.batch} must be a multiple of {parts}: 4 micro-batches on each rank")
        folder = new_output(options.output or Path("runs/twin") / OPEN_CLIP)
        if options.shards is None:
            scenes = WorldParameters(train=512, shard=128, probe=8, test=8, scenes=8, composition=0)
            ensure_world(folder / "scenes", scenes, 1, ProgressLines("scenes", "images"))
            options.shards = str(folder / "scenes" / "train")
        progress = ProgressLines("twin", "trainings")
        for place, ranks in enumerate(options.ranks):
            arguments = (ranks, options, folder, progress, place * len(options.cases) * len(options.precisions))
            if ranks == 1:
                train_cases(0, *arguments)
            else:
                torch.multiprocessing.spawn(train_cases, arguments, nprocs=ranks)
        write_page(folder, options)
    elif len(options.sides) == 2 and OPEN_CLIP not in options.sides:
        names = ("--steps", "--batch", "--shards", "--cases", "--precisions", "--ranks")
        refuse(options, names, f"is for clipzoo twin {OPEN_CLIP}")
        compare_runs(options)
    else:
        raise ConfigError(f"SIDE={' '.join(options.sides)}: give {OPEN_CLIP}, or two run directories")


# open_clip's program and ours.


def new_output(folder: Path) -> Path:
    """Make the folder of a page. Raises ConfigError if it has files."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: remove it, or give --output FOLDER")
    io.make_folder(folder)
    return folder


def train_cases(rank: int, ranks: int, options: Namespace, folder: Path, progress: ProgressLines, done: int) -> None:
    """Train the cases in both programs on one of several ranks; the first rank writes the curves to `folder`."""
    world = World()
    if ranks > 1:
        quiet_libraries()
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
        rendezvous = io.below(folder, f"rendezvous_{ranks}").absolute()
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
        world = World.from_process_group()
    results, batches = list[dict[str, Any]](), list[Batch]()
    for name in options.cases:
        plain = compose([*CASES[name].all_overrides, f"data.shards='{options.shards}'"])
        dataset = build_part(plain["data"], kind=Dataset)
        dataset.open(None, world)
        # All cases have one size of images and captions, and therefore the same batches.
        batches = batches or list(
            dataset.batches(
                seed=plain["seed"], global_batch=options.batch, world=world, start_step=0, stop_step=options.steps,
                trim_text=False,
            )
        )  # fmt: skip
        for precision in options.precisions:
            curves = train_both(CASES[name], precision, plain, dataset, batches, world)
            results.append({"case": name, "precision": precision, "ranks": ranks, **curves})
            done += 1
            if world.is_first:
                io.write_json(io.below(folder, f"curves_{ranks}.json"), results)
                progress(done, len(options.cases) * len(options.precisions) * len(options.ranks))
    world.leave()


def train_both(
    case: Case, precision: Precision, plain: dict[str, Any], dataset: Dataset, batches: Sequence[Batch], world: World
) -> dict[str, Any]:
    """Train one initial model in both programs.

    plain: our configuration. batches: this rank's batches of the dataset. Returns the curves of "clipzoo" and
    "open_clip"; "final": relative distances of the image towers' weights and running statistics after the last step.
    """
    import open_clip
    from open_clip.utils import freeze_batch_norm_2d
    from open_clip_train.params import parse_args

    flags = parse_args(case.all_flags)
    # open_clip's main adds these values to the flags.
    flags.rank, flags.local_rank, flags.world_size, flags.distill, flags.wandb = world.rank, 0, world.size, False, False
    flags.batch_size = len(batches[0]) // flags.accum_freq

    # The model of both programs.
    model, objective = build_model(plain), build_objective(plain)
    tower: Any = model.encoder.image_tower
    norms = [module for module in tower.modules() if case.frozen_norms and isinstance(module, nn.BatchNorm2d)]
    if norms:
        for norm in norms:
            nn.init.ones_(norm.weight)
            norm.momentum = None  # the running statistics become those of one batch
        with torch.no_grad():
            tower(model.encoder.normalised(batches[0].image))  # type: ignore[operator]
        world.broadcast_(tower.buffers())
    pair = objective.pair(dict(objective.state_dict()))
    exported = plain if pair is None else {**plain, PAIR: {"log_scale": pair[0], "bias": pair[1]}}
    with tempfile.TemporaryDirectory() as scratch:
        export(LoadedModel(model, exported), scratch)
        peer: Any = open_clip.create_model(f"local-dir:{scratch}", output_dict=True)
    if norms:
        peer.visual = freeze_batch_norm_2d(peer.visual)
        model.frozen = tuple(norm.requires_grad_(False) for norm in norms)
    dtype = torch.float64 if precision == "float64" else torch.float32
    model, peer = model.to(dtype), peer.to(world.device, dtype)

    pairs = ((model.encoder.normalised(batch.image), batch.text) for batch in batches)  # type: ignore[operator]
    inputs = (part for pair in pairs for part in zip(*(view.split(flags.batch_size) for view in pair), strict=True))
    curves = train_with_open_clip(peer, inputs, len(batches), flags, case.divides, world)
    micro_batch = flags.batch_size if flags.accum_freq > 1 else None
    schedule = Cosine(
        flags.lr, start=None, end=0.0, warmup_epochs=None, warmup_steps=flags.warmup, restart_epochs=None,
        per_epoch=False,
    )  # fmt: skip
    result = train(
        model, objective, dataset, batch=len(batches[0]) * world.size, steps=len(batches),
        optimizer=AdamW((flags.beta1, flags.beta2), flags.eps, weight_decay=flags.wd, schedule=schedule),
        computation=Computation(precision, micro_batch=micro_batch, clip_gradient=flags.grad_clip_norm),
        evaluate_every=None, seed=plain["seed"], world=world, log_every=1, quiet=True,
    )  # fmt: skip
    ours, theirs, final = tower.trunk.state_dict(), peer.visual.state_dict(), {}
    for kind in ("weights", "statistics"):
        names = [name for name in ours.keys() & theirs.keys() if theirs[name].is_floating_point()]
        names = [name for name in names if ("running_" in name) == (kind == "statistics")]
        squares = [[(ours[n] - theirs[n]).double().norm() ** 2, theirs[n].double().norm() ** 2] for n in names]
        distance, size = map(sum, zip(*squares, strict=True)) if squares else (0.0, 1.0)
        final[kind] = math.sqrt(distance / size)
    our_curves = {name: [line[name] for line in result.history] for name in VALUES}
    return {"clipzoo": our_curves, OPEN_CLIP: curves, "final": final}


def train_with_open_clip(
    peer: Any, inputs: Iterable[tuple[Tensor, ...]], steps: int, flags: Namespace, divides: bool, world: World
) -> Curves:
    """Train a model with open_clip's `train_one_epoch`; optimizer, schedule and loss are those of its main.

    inputs: images and token ids of this rank, a pair for each micro-batch. divides: see twin.yaml.
    """
    from open_clip import create_loss
    from open_clip_train.scheduler import cosine_lr
    from open_clip_train.train import train_one_epoch

    plain, decayed = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in peer.named_parameters():
        is_plain = parameter.ndim < 2 or any(part in name for part in ("bn", "ln", "bias", "logit_scale"))
        (plain if is_plain else decayed).append(parameter)
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": flags.wd}]
    optimizer = torch.optim.AdamW(groups, lr=flags.lr, betas=(flags.beta1, flags.beta2), eps=flags.eps)
    if divides:
        peer.logit_scale.register_hook(lambda gradient: gradient / flags.accum_freq)
    recorder, count = Recorder(peer, create_loss(flags)), steps * flags.accum_freq
    loader = Loader(inputs=inputs, num_batches=count, num_samples=count * flags.batch_size * world.size)
    train_one_epoch(
        peer if world.size == 1 else DistributedDataParallel(peer),
        {"train": Namespace(dataloader=loader, set_epoch=lambda epoch: None)},
        recorder.loss, 0, optimizer, recorder, cosine_lr(optimizer, flags.lr, flags.warmup, steps), None, flags,
    )  # fmt: skip
    curves = recorder.curves
    losses = world.mean(torch.tensor(curves["loss"], dtype=torch.float64)).tolist()
    return {**curves, "loss": losses, "temperature": [*curves["temperature"][1:], recorder.temperature()]}


class Loader(Namespace):
    """The members of open_clip's data loaders that its training reads."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter(self.inputs)


class Recorder(torch.amp.GradScaler):
    """Records losses, and as loss scaling that is turned off, gradients: `unscale_` is called before clipping."""

    def __init__(self, peer: Any, loss: nn.Module) -> None:
        super().__init__("cpu", enabled=False)
        self.curves: Curves = {name: [] for name in VALUES}
        self._peer, self._loss, self._last = peer, loss, math.nan

    def loss(self, **outputs: Any) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = self._loss(**outputs)
        self._last = float(torch.stack(list(losses.values())).detach().sum())
        return losses

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the values of a step; the temperature is that before its update."""
        gradients = [parameter.grad for parameter in self._peer.parameters() if parameter.grad is not None]
        values = self._last, float(nn.utils.get_total_norm(gradients)), self.temperature()
        for name, value in zip(VALUES, values, strict=True):
            self.curves[name].append(value)

    def temperature(self) -> float:
        return float((-self._peer.logit_scale.detach()).exp())


def write_page(folder: Path, options: Namespace) -> None:
    """Write the page of the curves in a folder. Raises TrainingError if a case that must agree does not."""
    files = (io.below(folder, f"curves_{ranks}.json") for ranks in options.ranks)
    results = [result for file in files for result in io.read_json(file, 256 * io.MB, root=list)]
    rows, failures, steps = [], [], range(1, options.steps + 1)
    losses: dict[str, dict[str, Sequence[float]]] = {name: {} for name in options.cases}
    distances: dict[str, dict[str, Sequence[float]]] = {name: {} for name in options.cases}
    for result in results:
        name, precision, ranks = result["case"], result["precision"], number_of(result["ranks"], "rank")
        differences = [relative(result["clipzoo"][value], result[OPEN_CLIP][value]) for value in VALUES]
        step = first_above(differences[0], BOUNDS[precision], steps)
        outcome = "agree" if not step else "differ, see the reason" if precision in CASES[name].reasons else "DIFFER"
        if outcome == "DIFFER":
            failures.append(f"{name} in {precision} on {ranks} from step {step}")
        numbers = [*(values.max() for values in differences), *result["final"].values()]
        rows.append([name, precision, ranks, outcome, step, *(f"{number:.1e}" for number in numbers)])
        losses[name] = {side: result[side]["loss"] for side in (OPEN_CLIP, "clipzoo")}
        distances[name][f"{precision}, {ranks}"] = differences[0].tolist()
    heads = ("case", "precision", "ranks", "losses", "first step above the bound", *VALUES, "weights", "statistics")
    title = "Largest relative difference of a step, and of the final image towers"
    table = text_table(heads, rows, left=4, title=title)
    facts: dict[str, Text] = {
        "command": Span(shlex.join(["clipzoo", *sys.argv[1:]]), "code"),
        "steps": f"{options.steps} of {options.batch} samples",
        "bounds": ", ".join(f"{bound:g} in {precision}" for precision, bound in BOUNDS.items()),
        "machine": f"{platform.machine()}, {number_of(os.cpu_count() or 1, 'core')}",
        "versions": f"clipzoo {revision()}, open_clip {version('open_clip_torch')}, torch {torch.__version__}",
    }
    reasons, commands = [], []
    for name, case in ((name, CASES[name]) for name in options.cases):
        notes = {**{f"{name} in {precision}": text for precision, text in case.reasons.items()}, name: case.note}
        reasons += [f"{title}: {text}" for title, text in notes.items() if text]
        words = [Span(shlex.join(words), "code") for words in (case.all_flags, case.all_overrides)]
        commands.append((f"{name}: ", words[0], " and ", words[1]))
    pictures = [picture("losses", steps, losses), picture("largest difference of the losses", steps, distances, True)]
    sections = [
        Section(facts=facts, text=[SETTINGS["description"]], tables=[table]),
        Section("Reasons", items=reasons),
        Section("Curves", figures=pictures),
        Section("Flags of open_clip and overrides of clipzoo", items=commands),
    ]
    page = write("The same training in open_clip and in clipzoo", [folder / name for name in PAGES], sections)
    print(f"{terminal(table)}\n{page}")
    if failures:
        raise TrainingError(f"losses differ by more than the bound: {', '.join(failures)}")


# Comparison of values, for both.


def relative(values: Sequence[float], others: Sequence[float]) -> np.ndarray:
    """Return the relative differences of two sequences of values; 0 where both are equal or not a number."""
    a, b = (np.asarray(side, dtype=np.float64) for side in (values, others))
    equal = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(equal, 0.0, np.abs(a - b) / np.where(equal, 1.0, np.maximum(np.abs(a), np.abs(b))))


def first_above(differences: np.ndarray, bound: float, steps: Sequence[int]) -> str:
    """Return the first step whose difference is above the bound or not a number; "" if there is none."""
    above = np.flatnonzero(~(differences <= bound))
    return str(steps[above[0]]) if len(above) else ""


def picture(
    title: str, steps: Sequence[int], curves: Mapping[str, Mapping[str, Sequence[float]]], logarithmic: bool = False
) -> Picture:
    """Return a picture of curves by panel and label."""
    figure, axes = tiles(len(curves), 4, 3.4, 2.4)
    for panel, (name, lines) in zip(axes, curves.items(), strict=True):
        for number, (text, values) in enumerate(lines.items()):
            # The largest value so far; a logarithmic axis has no 0.
            heights = np.maximum.accumulate(np.maximum(values, 1e-18)) if logarithmic else values
            panel.plot(steps, heights, color=colour(number), linewidth=1 if number or logarithmic else 3, label=text)
        if logarithmic:
            panel.set_yscale("log")
        label(panel, name, "step", title, grid="y")
    if any(next(iter(curves.values()))):
        axes[0].legend(fontsize=7)
    return Picture(title, figure, title, f"{title.replace(' ', '_')}.png")


# Two runs of clipzoo.


def compare_runs(options: Namespace) -> None:
    """Compare settings, logged values and checkpoints of two runs, and write the page.

    Raises TrainingError if they differ by more than the tolerance.
    """
    runs = [local_copy(side, "SIDE") for side in options.sides]
    for run in runs:
        if not run.is_dir():
            raise ConfigError(f"there is no run directory {run}")
    names = [str(run) for run in runs]
    settings = [flat(config_of(run)) for run in runs]
    keys = [key for key in {**settings[0], **settings[1]} if settings[0].get(key) != settings[1].get(key)]
    changed: list[list[str | Cell]] = [
        [Cell(key, code=True), *(str(values.get(key, "")) for values in settings)] for key in keys
    ]
    logs = [{int(line["step"]): line for line in TrainingLog.read(run).training} for run in runs]
    parent = runs[0].resolve().parent
    folder = new_output(options.output or io.below(parent / "twin", "-".join(run.resolve().name[:100] for run in runs)))

    rows, pictures, findings = [], [], []
    for name in (*VALUES, "lr"):
        steps = [step for step in sorted(logs[0].keys() & logs[1].keys()) if all(name in log[step] for log in logs)]
        if not steps:
            continue
        curves = [[float(log[step][name]) for step in steps] for log in logs]
        differences = relative(*curves)
        first, above = (first_above(differences, bound, steps) for bound in (0.0, options.tolerance))
        if above:
            findings.append(f"{name} at step {above}")
        at = [f"{log[int(first)][name]!r}" if first else "" for log in logs]
        rows.append([name, f"{len(steps)}", first, *at, above, f"{differences.max():.1e}"])
        if name == "loss":
            title = "largest difference of the losses"
            pictures = [picture("losses", steps, {"": dict(zip(names, curves, strict=True))})]
            pictures.append(picture(title, steps, {"": {"": differences.tolist()}}, True))
    heads = ["value", "steps", "first difference", *names, "first above the tolerance", "largest relative difference"]
    tables = [text_table(heads, rows, left=1, title="Logged values")]

    # Checkpoints of the same step, up to the first that differ.
    paths = [{step_of(path): path for path in checkpoints_in(run / "checkpoints")} for run in runs]
    shared = sorted(paths[0].keys() & paths[1].keys())
    equal, tensors = 0, list[list[str]]()
    for step in shared:
        tensors = list(tensor_differences([read(path[step]) for path in paths], options.tolerance))
        if tensors:
            findings.insert(0, f"{tensors[0][0]} in the checkpoints of step {step}, by {tensors[0][-1]}")
            heads = ["tensor", "shape", *names, "relative difference"]
            title = f"Tensors that differ at step {step}: {len(tensors)}, the first of them"
            tables.append(text_table(heads, tensors[:20], left=2, title=title))
            break
        equal = step
    text: list[Text] = [f"The runs differ in {finding}." for finding in findings] or ["The runs are equal."]
    text.append(f"Checkpoints up to step {equal} are equal." if equal else "No checkpoints of the same step are equal.")
    if findings and not (tensors and step == equal + 1):
        last = step if tensors else max(logs[0], default=1)
        text.append("To find the step and tensor exactly, train both runs again with a checkpoint of every step:")
        for run in runs:
            command = RunRecord.read(run).command if is_finished(run) else f"clipzoo train [overrides of {run}]"
            every = f"trainer.checkpoints.every=1 trainer.checkpoints.keep={last}"
            text.append(Span(f"{command} runs={parent / 'every_step'} name={run.resolve().name} {every}", "command"))
    tables.append(text_table(["key", *names], changed, left=3, title="Settings that differ", wrap=True))
    facts = {"runs": " and ".join(names), "tolerance": f"{options.tolerance:g}"}
    section = Section(facts=facts, text=text, tables=tables, figures=pictures)
    page = write("Two runs step by step", [folder / name for name in PAGES], [section])
    print("\n".join([*(span.text if isinstance(span, Span) else str(span) for span in text), str(page)]))
    if findings:
        raise TrainingError(f"the runs differ in {', '.join(findings)}")


def tensor_differences(states: Sequence[Mapping[str, Any]], tolerance: float) -> Iterator[list[str]]:
    """Yield name, shape, values and relative difference of the tensors that differ by more than the tolerance.

    states: contents of two checkpoints. Weights come first, then the optimizer's moments and all other state. The
    values are those at the largest difference, which is divided by the tensor's largest value.
    """
    parts = sorted(states[0].keys() | states[1].keys(), key=lambda part: (part != MODEL, part != "optimizer"))
    sides = [dict(tensors_with_paths({part: state.get(part) for part in parts})) for state in states]
    for path in {**sides[0], **sides[1]}:
        a, b = (side.get(path) for side in sides)
        if a is None or b is None or a.shape != b.shape:
            shapes = ("missing" if tensor is None else str(list(tensor.shape)) for tensor in (a, b))
            yield [name_of(path), "", *shapes, "inf"]
        elif not torch.equal(a, b):
            flat_a, flat_b = (tensor.double().flatten() for tensor in (a, b))
            distances = (flat_a - flat_b).abs().nan_to_num(math.inf)
            place = int(distances.argmax())
            difference = float(distances[place] / max(flat_a.abs().max(), flat_b.abs().max()))
            if not difference <= tolerance:
                values = (f"{side[place]:.17g}" for side in (flat_a, flat_b))
                yield [name_of(path), str(list(a.shape)), *values, f"{difference:.1e}"]
