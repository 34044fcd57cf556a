"""Compare methods with equal search budgets and fresh seeds on generated scenes.

The same command continues after a kill.

clipzoo lab                                     the lab of conf/lab/default.yaml, in the folder lab/default
clipzoo lab my_lab.yaml --output lab/mine       your own lab
clipzoo lab --methods CLIP KME-CLIP --seeds 10  some methods, more seeds
clipzoo lab scaling                             power laws in compute, samples and width
clipzoo lab mine.yaml --config-dir conf --trust mypackage   a lab with your own head
clipzoo lab --report                            the page of the trainings so far

Any number of processes may run the same command: they share the trainings.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import yaml
from torch import Tensor

from clipzoo import io
from clipzoo.build import build_model, build_objective, build_part as build_part
from clipzoo.cli.arguments import number_in, output_folder, with_config_folder
from clipzoo.config.compose import compose
from clipzoo.config.groups import CONF
from clipzoo.config.schema import kinds_of
from clipzoo.data.in_memory import InMemoryDataset
from clipzoo.distributed.launch import say
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError, TrainingError, first_line
from clipzoo.lab.methods.judge import ACCURACY, Split, judge, judge_scores
from clipzoo.lab.methods.page import BEST, CLAIM, MANIFEST, METRICS, OUTCOMES, curve_of, is_whole, read_run, write_page
from clipzoo.lab.worlds.scenes import COLOURS, SHAPES, render
from clipzoo.lab.worlds.world import CaptionSettings, EnumeratedWorld
from clipzoo.model import Model
from clipzoo.runs.directory import CONFIG, is_finished
from clipzoo.runs.lock import try_lock
from clipzoo.runs.record import ENDED_EARLY, MetricKey, RunRecord, results
from clipzoo.runs.search import Search, Space, Trial, Value, next_point, passes, space_of
from clipzoo.training.parts import Optimizer
from clipzoo.training.settings import Computation
from clipzoo.training.throughput import flops_per_step
from clipzoo.training.train import train
from clipzoo.types import Ascending, Batch, Count, Part, Probability, Progress, Range, Seed, Share, as_captions, checked

SCALES, BUDGETS = "scales", "budgets"
"""Optional keys of a lab. scales: overrides by name; every method is trained with each of them. budgets: factors of
trainer.steps, beyond 1 for the methods of the claims; the value names the budget whose search chooses the settings."""
KINDS = {
    "title": "str", "baseline": "str", "seeds": "Count", "evaluations": "Count", "search": "dict",
    "training": "list[str]", "ranges": "list[str]", "worlds": "dict[str, dict]", "towers": "dict[str, list[str]]",
    "methods": "dict[str, list[str]]", "comparisons": "list[dict]", "claims": "list[dict]",
    SCALES: "dict[str, list[str]]", BUDGETS: "dict[Count, Count]",
}  # fmt: skip
"""Type annotations by key of a lab's YAML file."""
STEPS = "trainer.steps"
SEARCH_SEED = 0
"""Seed of all trainings of a search; the winner's fresh seeds follow it."""
DATA = ("data=demo", "eval=none", "trainer.precision=float32")
"""Overrides of every training; the dataset of the configuration is not used."""
WORDS = (*SHAPES, *COLOURS, "a", "an", "and", "something", "picture", "image", "of", "this", "shows")
Continues = Callable[[int, float], bool]
"""Called with the number of an evaluation during a training and its accuracy; False stops the training."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("lab", nargs="?", default="default", help="name in conf/lab, or a YAML file")
    add("--output", type=output_folder, help="folder of the lab (default: lab/NAME)")
    add("--methods", nargs="+", default=[], metavar="METHOD", help="only these methods")
    add("--comparisons", nargs="+", default=[], metavar="WORLD-TOWER", help="only these comparisons")
    add("--seeds", type=number_in(Count), help="fresh seeds of every winner")
    add("--trust", nargs="+", default=[], metavar="PACKAGE", help="packages of the methods' own classes")
    add("--config-dir", type=Path, metavar="FOLDER", help="folder of custom config options, as for clipzoo train")
    add("--report", action="store_true", help="train nothing; write the page of the trainings so far")
    add("--page", type=Path, help="file of the Markdown page (default: lab.md in the folder of the lab)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    if options.config_dir is not None:
        with_config_folder(["--config-dir", str(options.config_dir)])
    lab = read_settings(options.lab).chosen(options.methods, options.comparisons, options.seeds)
    lab = replace(lab, trust=tuple(options.trust))
    output = options.output or io.below(Path("lab"), lab.name)
    if not options.report:
        run_lab(lab, output)
    # The page shows the command with these options.
    words = ["clipzoo", "lab", *([] if options.lab == "default" else [options.lab])]
    for name in ("methods", "comparisons", "seeds", "trust", "config_dir"):
        if value := getattr(options, name):
            words += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    page, index = write_page(output, options.page, shlex.join(words), lab.said)
    print(f"the page of the lab: {page}, {index}")


@checked
@dataclass(frozen=True)
class WorldSettings:
    """A world and its splits.

    shapes, colours: number of either. image_size: side in pixels. train: number of training pairs.
    validation, test: images of each scene in these splits, whose scenes are equally frequent. seed: seeds all images.
    several, partial, openings, popularity, unmatched: see `CaptionSettings`.
    """

    shapes: Annotated[int, Range(at_least=2, at_most=10)]
    colours: Annotated[int, Range(at_least=2, at_most=10)]
    image_size: Count
    train: Count
    validation: Count
    test: Count
    seed: Seed
    several: Probability
    partial: Probability
    openings: Annotated[int, Range(at_least=1, at_most=4)]
    popularity: Annotated[float, Range(at_least=0, at_most=3)]
    unmatched: Probability


@checked
@dataclass(frozen=True)
class SearchSettings:
    """The budget of every method: `trials` points of its ranges.

    rungs, keep, seed: as `search.rungs`, `search.keep` and `search.seed` of a configuration.
    """

    trials: Count
    rungs: Annotated[list[Annotated[float, Range(above=0, below=1)]], Ascending()]
    keep: Share
    seed: Seed


@dataclass(frozen=True)
class Comparison:
    """Methods that are compared on one world with one pair of towers, at one budget.

    methods: their overrides by name. budget: factor of their steps. searched: name of the comparison, this or one of
    fewer steps, whose searches choose their settings.
    """

    name: str
    world_name: str
    tower: str
    world: WorldSettings
    budget: int
    searched: str
    methods: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class LabSettings:
    """A lab.

    name: stem of the YAML file. baseline: method that the others are compared with. seeds: fresh seeds of every winner.
    evaluations: evenly spaced evaluations on the validation split during a training. claims: statements of papers that
    method `better` has a better `metric` than method `than` in `comparison`. scales: names of the scales, for the power
    laws of the page. trust: packages whose classes the methods may name; only from the command line.
    """

    name: str
    title: str
    baseline: str
    seeds: int
    evaluations: int
    search: SearchSettings
    comparisons: tuple[Comparison, ...]
    claims: tuple[Mapping[str, str], ...]
    scales: tuple[str, ...] = ()
    trust: tuple[str, ...] = ()

    @property
    def said(self) -> dict[str, object]:
        """Settings that change only the page: no training depends on them."""
        return {
            "title": self.title, "baseline": self.baseline, "claims": list(self.claims), "scales": list(self.scales),
            "rungs": list(self.search.rungs),
        }  # fmt: skip

    def chosen(self, methods: Sequence[str], comparisons: Sequence[str], seeds: int | None) -> LabSettings:
        """Return the lab with only these methods and comparisons; empty lists keep all. Raises ConfigError."""
        _require_known("method", methods, dict.fromkeys(name for part in self.comparisons for name in part.methods))
        _require_known("comparison", comparisons, [part.name for part in self.comparisons])
        parts = []
        for part in self.comparisons:
            kept = {name: lines for name, lines in part.methods.items() if not methods or name in methods}
            if kept and (not comparisons or part.name in comparisons):
                parts.append(replace(part, methods=kept))
        for part in parts:
            if not any(other.name == part.searched for other in parts):
                raise ConfigError(f"--comparisons {part.name} needs the searches of {part.searched}: give both")
        return replace(self, comparisons=tuple(parts), seeds=seeds or self.seeds)


def read_settings(name: str) -> LabSettings:
    """Read the lab of a name in conf/lab, or of the path of a YAML file. Raises ConfigError."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else CONF / "lab" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in (CONF / "lab").glob("*.yaml")))
        raise ConfigError(f"there is no lab {name}: give a YAML file, or one of {known}")
    content: dict[str, Any] = {SCALES: {}, BUDGETS: {1: 1}, **io.read_yaml(path)}
    io.require_fields(path, content, kinds_of(KINDS))
    if unknown := [key for key in content if key not in KINDS]:
        raise ConfigError(f"{path} has the unknown key {unknown[0]}; its keys are {', '.join(KINDS)}")
    parts: list[Comparison] = []
    for (budget, searched), node in itertools.product(content[BUDGETS].items(), content["comparisons"]):
        io.require_fields(path, node, {"world": str, "tower": str, **({"methods": list} if "methods" in node else {})})
        for kind in ("world", "tower"):
            _require_known(kind, [node[kind]], content[f"{kind}s"])
        names = node.get("methods") or list(content["methods"])
        _require_known("method", names, content["methods"])
        name = f"{node['world']}-{node['tower']}"
        if content[BUDGETS].get(searched) != searched:
            raise ConfigError(f"{path}: budgets.{budget}={searched}, which must be a budget with its own search")
        if budget > 1:
            claimed = [claim for claim in content["claims"] if claim.get("comparison") == name]
            names = [method for method in names if any(method in claim.values() for claim in claimed)]
        shared = [*content["towers"][node["tower"]], *content["training"], *content["ranges"]]
        methods: dict[str, tuple[str, ...]] = {}
        for method, (scale, scale_overrides) in itertools.product(names, (content[SCALES] or {"": []}).items()):
            # Later lines replace earlier ones of the same key.
            merged: dict[str, str] = {}
            for line in (*shared, *content["methods"][method], *scale_overrides):
                merged.pop(key := line.partition("=")[0], None)
                merged[key] = line
            if budget > 1:
                steps = merged.get(STEPS, "").partition("=")[2]
                if not steps.isdigit():
                    raise ConfigError(f"{path}: {BUDGETS} multiply {STEPS}, and {method} has {steps or 'none'}")
                merged[STEPS] = f"{STEPS}={budget * int(steps)}"
            methods[f"{method}, {scale}" if scale else method] = tuple(merged.values())
        world = _built(WorldSettings, content["worlds"][node["world"]], f"{path}: worlds.{node['world']}")
        if methods:
            by_budget = [f"{name}-x{factor}" if factor > 1 else name for factor in (budget, searched)]
            parts.append(Comparison(by_budget[0], node["world"], node["tower"], world, budget, by_budget[1], methods))
    by_name = {part.name: part for part in parts}
    for claim in content["claims"]:
        io.require_fields(path, claim, kinds_of(CLAIM))
        _require_known("comparison", [claim["comparison"]], by_name)
        _require_known("method", [claim["better"], claim["than"]], by_name[claim["comparison"]].methods)
        _require_known("metric", [claim["metric"]], METRICS)
    search = _built(SearchSettings, content["search"], f"{path}: search")
    if any(abs(place - round(place)) > 1e-9 for place in (rung * content["evaluations"] for rung in search.rungs)):
        raise ConfigError(f"{path}: search.rungs={search.rungs} must be multiples of 1 / evaluations")
    plain = {key: content[key] for key in ("title", "baseline", "seeds", "evaluations")}
    return LabSettings(
        path.stem, **plain, search=search, comparisons=tuple(parts), claims=tuple(content["claims"]),
        scales=tuple(content[SCALES]),
    )  # fmt: skip


def _built(kind: type, values: Any, place: str) -> Any:
    names = [field.name for field in fields(kind)]
    if not isinstance(values, dict) or set(values) != set(names):
        raise ConfigError(f"{place} must have the keys {', '.join(names)}")
    return kind(**values)


def _require_known(kind: str, names: Sequence[str], known: Collection[str]) -> None:
    for name in names:
        # A list, not a set: a name from a damaged file may be unhashable.
        if name not in [*known]:
            raise ConfigError(f"there is no {kind} {name} in this lab: give one of {', '.join(known)}")


@dataclass(frozen=True)
class LabData:
    """A world and its splits: training pairs drawn from the world, and equally many images of every scene to judge."""

    settings: WorldSettings

    @cached_property
    def world(self) -> EnumeratedWorld:
        captions = {field.name: getattr(self.settings, field.name) for field in fields(CaptionSettings)}
        return EnumeratedWorld(self.settings.shapes, self.settings.colours, CaptionSettings(**captions))

    @cached_property
    def train(self) -> Split:
        return self._split(0, [None] * self.settings.train)

    @cached_property
    def validation(self) -> Split:
        return self._split(1, [*range(len(self.world.scenes))] * self.settings.validation)

    @cached_property
    def test(self) -> Split:
        return self._split(2, [*range(len(self.world.scenes))] * self.settings.test)

    def _split(self, stream: int, scenes: list[int] | list[None]) -> Split:
        images, pairs = [], []
        for index, wanted in enumerate(scenes):
            random = np.random.default_rng([self.settings.seed, stream, index])
            scene, caption = self.world.draw(random, wanted)
            images.append(render(self.world.picture(scene, random), self.settings.image_size, random))
            pairs.append((scene, caption))
        return Split(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), *np.array(pairs).T)


def run_lab(lab: LabSettings, root: Path) -> None:
    """Train everything that is not finished under `root`. The same call continues after a kill.

    Raises ConfigError before anything is trained, if the overrides of a method are not valid.
    """
    # The matrices are small: a second thread costs more than it gains, and another process may use the core.
    torch.set_num_threads(1)
    all_cells = cells(lab, root)
    for cell in all_cells:
        settings_of(cell.space.corner_lines()[0], lab.trust)
    # The page also needs the methods, their points, and the metrics of the PMI as a score.
    comparisons = []
    for part in lab.comparisons:
        group = [cell for cell in all_cells if cell.comparison is part]
        methods = [
            {"name": cell.method, "folder": str(cell.folder.relative_to(root)), "points": cell.points} for cell in group
        ]
        steps = settings_of(group[0].space.corner_lines()[0], lab.trust)["trainer"]["steps"]
        facts = {
            "name": part.name, "world": part.world_name, "tower": part.tower, "budget": part.budget, "steps": steps,
            "methods": methods,
        }  # fmt: skip
        comparisons.append({**facts, **oracle(group[0].data)})
    manifest = {"name": lab.name, "seeds": lab.seeds, "trials": lab.search.trials, "comparisons": comparisons}
    io.write_json(root / MANIFEST, {**manifest, **lab.said})
    while not all(cell.is_done() for cell in all_cells):
        if not any(cell.work() for cell in all_cells):
            time.sleep(2.0)  # other processes train the rest


def cells(lab: LabSettings, root: Path) -> list[Cell]:
    """Return all methods of all comparisons, in the order of the settings."""
    worlds: dict[str, LabData] = {}
    return [
        Cell(lab, part, method, worlds.setdefault(part.world_name, LabData(part.world)), root)
        for part in lab.comparisons
        for method in part.methods
    ]


def oracle(data: LabData) -> dict[str, Any]:
    """Return facts of a world, and the metrics of the pointwise mutual information as a score on its test split."""
    world, split = data.world, data.test
    names = np.array([[item in scene for item in world.objects] for scene in world.scenes], dtype=np.float64)
    metrics, _ = judge_scores(world.pmi[split.scenes], names[split.scenes], world, split)
    return {
        "scenes": len(world.scenes), "captions": len(world.captions), "information": world.information,
        "oracle": metrics, "chance": 100 * 2 / len(world.objects),
    }  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A method of a comparison: its search, then the winner with fresh seeds. Any number of processes may share it.

    <folder>/trial-<n>     run directory of point n of the search
    <folder>/seed-<seed>   run directory of the winner with a fresh seed

    The process that holds the lock of a run directory trains the run; results.json marks it as finished.
    """

    lab: LabSettings
    comparison: Comparison
    method: str
    data: LabData
    root: Path

    @cached_property
    def folder(self) -> Path:
        """Folder named by comparison, method and a digest of all settings: runs of different settings never mix."""
        described = {
            "world": asdict(self.comparison.world), "overrides": list(self.comparison.methods[self.method]),
            "search": asdict(self.lab.search), "evaluations": self.lab.evaluations,
        }  # fmt: skip
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:8]
        slug = "".join(letter if letter.isalnum() else "-" for letter in self.method.lower())
        return io.below(self.root, f"{self.comparison.name}/{slug}-{digest}")

    @cached_property
    def space(self) -> Space:
        return space_of([], self.comparison.methods[self.method])

    @cached_property
    def points(self) -> list[dict[str, Value]]:
        """All points of the search: quasi-random draws do not depend on results."""
        settings = self.lab.search
        search = Search(
            sampler="quasi_random", trials=settings.trials, maximize=[ACCURACY], minimize=[], seed=settings.seed,
            startup=settings.trials, rungs=settings.rungs, keep=settings.keep, launcher=None,
        )  # fmt: skip
        drawn: list[Trial] = []
        while len(drawn) < settings.trials and (values := next_point(search, self.space, drawn)) is not None:
            drawn.append(Trial(len(drawn), values, "running", ()))
        return [dict(trial.values) for trial in drawn]

    @cached_property
    def trials(self) -> list[Path]:
        part = next(part for part in self.lab.comparisons if part.name == self.comparison.searched)
        folder = replace(self, comparison=part).folder
        return [folder / f"trial-{number}" for number in range(len(self.points))]

    @property
    def seeds(self) -> dict[int, Path]:
        """Run directories of the winner by fresh seed."""
        return {seed: self.folder / f"seed-{seed}" for seed in range(SEARCH_SEED + 1, SEARCH_SEED + 1 + self.lab.seeds)}

    def work(self) -> bool:
        """Do one training that no other process is doing; return False if there is none."""
        for number, (run, values) in enumerate(zip(self.trials, self.points, strict=True)):
            if self.comparison.searched != self.comparison.name:
                break
            title = f"trial {number + 1} of {len(self.points)}"
            if self._train(run, title, values, SEARCH_SEED, partial(self._passes, number)):
                return True
        if not all(map(is_finished, self.trials)) or (winner := self._winner()) is None:
            return False
        return any(self._train(run, f"seed {seed}", self.points[winner], seed) for seed, run in self.seeds.items())

    def is_done(self) -> bool:
        """Return True if nothing is left to train."""
        is_searched = all(map(is_finished, self.trials))
        return is_searched and (self._winner() is None or all(map(is_finished, self.seeds.values())))

    def _winner(self) -> int | None:
        """Return the number of the trial with the best validation accuracy; None if no trial is whole."""
        records = enumerate(map(read_run, self.trials))
        reached = {number: record.metrics[BEST] for number, record in records if is_whole(record)}
        return max(reached, key=lambda number: (reached[number], -number), default=None)

    def _passes(self, number: int, evaluation: int, accuracy: float) -> bool:
        """Return True if a trial continues after one of its evaluations. At a rung, only the best trials do."""
        if evaluation not in [round(rung * self.lab.evaluations) for rung in self.lab.search.rungs]:
            return True
        others = []
        for other, run in enumerate(self.trials):
            if run.exists():
                # The accuracies that the other trial has reached, from its log and its results.
                curve = list(curve_of(run).values())
                if is_finished(run) and not is_whole(record := RunRecord.read(run)) and BEST in record.metrics:
                    curve.append(record.metrics[BEST])  # the rung at which it was stopped
                others.append(Trial(other, {}, "running", (), rungs=dict(enumerate(curve, 1))))
        return passes(evaluation, accuracy, others, number, True, self.lab.search.keep)

    def _train(
        self, run: Path, title: str, values: Mapping[str, Value], seed: int, continues: Continues | None = None
    ) -> bool:
        """Train a run unless it is finished or another process trains it; return True if it was trained."""
        if is_finished(run):
            return False
        io.make_folder(run)
        if (lock := try_lock(run / ".lock")) is None:
            return False
        try:
            if is_finished(run):
                return False
            record = train_run(run, self.space.overrides(values), self.data, seed, self.lab, continues)
        finally:
            os.close(lock)
        accuracy = record.metrics.get(BEST if title.startswith("trial") else MetricKey("test", "", "", ACCURACY), 0.0)
        outcome = record.training.get(ENDED_EARLY)
        outcome = outcome or f"accuracy {accuracy:.1f} %, {record.training['processor']:.1f} s of CPU time"
        say(f"{time.strftime('%H:%M:%S')}  {self.comparison.name}, {self.method}, {title}: {outcome}")
        return True


class StoppedEarlyError(Exception):
    """A training has not passed a rung of its search."""


def train_run(
    run: Path, overrides: Sequence[str], data: LabData, seed: int, lab: LabSettings, continues: Continues | None
) -> RunRecord:
    """Train a model on the pairs of a world, judge it and write its run directory. Return the record.

    The metrics are those of both splits ("test/accuracy"), and of the logits [b, b] of a batch before the first step:
    start/mean, start/deviation: of all logits. start/interaction: standard deviation of the logits less the means of
    their rows and columns, the part that depends on the pair; the loss falls only through it. start/loss: of the
    objective. start/encoder_gradient, start/head_gradient: norms of its gradient.

    evaluation/outcomes.npz has the outcomes of the test samples by task. The record of a training that diverged or was
    stopped says so.
    """
    line = (*overrides, f"seed={seed}")
    plain = settings_of(line, lab.trust)
    # The dataset of the composed configuration is not used: the record names the world.
    plain["data"] = {"_target_": f"{LabData.__module__}.{LabData.__name__}", **asdict(data.settings)}
    # A training takes seconds: after a kill it starts again instead of resuming a checkpoint.
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    io.write_whole(run / CONFIG, yaml.safe_dump(plain, sort_keys=False))
    model, objective = build_model(plain, trust=lab.trust), build_objective(plain, lab.trust)
    optimizer = build_part(plain["optim"], lab.trust, Optimizer)
    factor = score_factor(plain)
    batch, steps = plain["trainer"]["global_batch"], plain["trainer"]["steps"]
    tokens = model.encoder.tokenizer(data.world.captions)[data.train.captions]  # [n, L]
    sample = Batch(data.train.images[:batch], tokens[:batch], torch.arange(batch))
    # Copies: the objective has state for each sample, and the weights get gradients.
    initial, allocated = deepcopy(model).train(), deepcopy(objective)
    allocated.allocate(data.settings.train)
    similarity = initial(sample)
    logits = similarity.image_to_text.dense().detach().double()
    loss = allocated(similarity, sample, Progress(0, steps, data.settings.train, batch)).total
    loss.backward()
    pair_part = logits - logits.mean(0) - logits.mean(1, keepdim=True) + logits.mean()
    metrics = {
        "start/mean": float(logits.mean()), "start/deviation": float(logits.std()),
        "start/interaction": float(pair_part.std()), "start/loss": float(loss.detach()),
    }  # fmt: skip
    for name, part in (("encoder", initial.encoder), ("head", initial.head)):
        squares = [weight.grad.double().square().sum() for weight in part.parameters() if weight.grad is not None]
        metrics[f"start/{name}_gradient"] = float(torch.stack(squares).sum().sqrt())
    done, evaluating = 0, 0.0

    def evaluate(trained: Model) -> Mapping[str, float]:
        nonlocal done, evaluating
        began, done = time.process_time(), done + 1
        measured, _ = judge(trained, data.world, data.validation, factor)
        evaluating += time.process_time() - began
        if done < lab.evaluations and continues and not continues(done, measured[ACCURACY]):
            metrics[str(BEST)] = measured[ACCURACY]
            raise StoppedEarlyError
        return {f"validation/{metric}": value for metric, value in measured.items()}

    cost: dict[str, Any] = {}
    used = time.process_time()
    try:
        cost |= train(
            model, objective, InMemoryDataset(data.train.images, tokens), batch=batch, steps=steps,
            optimizer=optimizer, evaluate=evaluate,
            evaluate_every=steps * batch / len(data.train.scenes) / lab.evaluations,
            computation=Computation(tile=None), device="cpu", seed=seed, folder=run, log_every=steps,
            save_every=steps, quiet=True,
        ).cost  # fmt: skip
    except StoppedEarlyError:
        cost[ENDED_EARLY] = "stopped early"
    except TrainingError as error:
        cost[ENDED_EARLY] = first_line(error)
    else:
        processor = time.process_time() - used - evaluating
        for name, split in (("validation", data.validation), ("test", data.test)):
            measured, outcomes = judge(model, data.world, split, factor)
            metrics |= {f"{name}/{metric}": value for metric, value in measured.items()}
        rounded: dict[str, Any] = {task: np.round(values, 4) for task, values in outcomes.items()}
        with io.whole(run / "evaluation" / OUTCOMES) as file:
            np.savez_compressed(file, **rounded)
        flops = steps * flops_per_step(model, sample, World(), None)
        cost |= {"flops": flops, "processor": processor, "samples": steps * batch}
    record = results(run, plain, None, line, cost, metrics)
    record.write(run)
    return record


def settings_of(overrides: Sequence[str], trust: Collection[str]) -> dict[str, Any]:
    """Return the checked configuration of a training. Raises ConfigError, also for a class that is not trusted."""
    # A class in the YAML file of a lab is not trusted as one on a command line is.
    return compose([*DATA, *overrides], trust=trust)


def score_factor(plain: Mapping[str, Any]) -> float:
    """Return the factor that turns scores into logits: a cosine head leaves the temperature to its objective."""
    is_cosine = plain["head"].get("max_scale") == 1.0
    return 1 / plain["objective"]["temperature"] if is_cosine and "temperature" in plain["objective"] else 1.0


class WordTokenizer(Part):
    """Captions -> int64 [n, context_length], one id per word, padded with 0. Raises ValueError for another word."""

    start_token = 62
    end_token = 63
    vocabulary = 64

    def __init__(self, context_length: Annotated[int, Range(at_least=3)]) -> None:
        self.context_length = context_length
        self._ids = {word: number for number, word in enumerate(WORDS, 1)}

    def __call__(self, captions: str | Sequence[str]) -> Tensor:
        captions = as_captions(captions)
        rows = torch.zeros(len(captions), self.context_length, dtype=torch.int64)
        for row, caption in zip(rows, captions, strict=True):
            words = caption.split()
            if unknown := [word for word in words if word not in self._ids]:
                raise ValueError(f"{caption!r} has a word that is not in the vocabulary: {unknown[0]}")
            ids = [self._ids[word] for word in words[: self.context_length - 2]]
            row[: len(ids) + 2] = torch.tensor([self.start_token, *ids, self.end_token])
        return rows
