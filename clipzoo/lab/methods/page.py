"""The page of a lab: Markdown with picture files, and one HTML file."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from clipzoo import io
from clipzoo.config.schema import kinds_of
from clipzoo.errors import ConfigError
from clipzoo.lab.methods.judge import ACCURACY, LOSS
from clipzoo.report import scaling as scaling_page, statistics
from clipzoo.report.figures import INK, MUTED, RIGHT, WRONG, colour, label, panels, style, tiles
from clipzoo.report.render import Cell, Picture, Section, Span, text_table, write
from clipzoo.report.scaling import COMPUTE, SAMPLES, WIDTH, Training, curves
from clipzoo.report.statistics import Difference, Interval
from clipzoo.runs.directory import is_finished
from clipzoo.runs.record import ENDED_EARLY, FILE, MetricKey, RunRecord, TrainingLog, read_arrays, revision
from clipzoo.runs.search import Trial, front
from clipzoo.runs.status import LAB as MANIFEST

PAGE, NOTES, OUTCOMES, LOG = "lab.md", "notes.txt", "outcomes.npz", "metrics.jsonl"
TASKS = {ACCURACY: "accuracy", "zero_shot": "zero-shot", "image_to_text": "image to text",
         "text_to_image": "text to image"}  # fmt: skip
"""Metrics in percent, and their names on the page."""
SIMILARITY = {"rank_correlation": "rank correlation", "slope": "slope", "error": "error, nats",
              "calibrated_error": "error after calibration, nats"}  # fmt: skip
"""Measures of the agreement with the PMI."""
BEST = MetricKey("validation", "", "", ACCURACY)
"""The metric that selects the winner of a search."""
START = {"mean": "mean", "deviation": "deviation", "interaction": "of pairs", "loss": "loss",
         "encoder_gradient": "gradient of the towers"}  # fmt: skip
"""Statistics of the scores before the first step."""
METRICS = tuple(name for name in (*TASKS, *SIMILARITY) if name != "slope")
"""Metrics that a claim may compare."""
NUMBER = "Annotated[float, Range(at_least=-1e15, at_most=1e15)]"
COST = "Annotated[float, Range(at_least=0, at_most=1e30)]"
PERCENT = "Annotated[float, Range(at_least=0, at_most=100)]"
FACTS = {"title": "str", "baseline": "str", "seeds": "Count", "trials": "Count", "comparisons": "list[dict]",
         "claims": "list[dict]"}  # fmt: skip
"""Annotations of the values in lab.json, and of those of a comparison and of a method in it."""
COMPARISON = {"name": "str", "world": "str", "tower": "str", "budget": "Count", "steps": "Count",
              "methods": "list[dict]", "scenes": "Count",
              "captions": "Count", "information": NUMBER, "chance": NUMBER,
              "oracle": f"dict[str, {NUMBER}]"}  # fmt: skip
METHOD = {"name": "str", "folder": "str", "points": "list[dict]"}
CLAIM = dict.fromkeys(("says", "source", "better", "than", "comparison", "metric"), "str")
CLAIM["warmup"] = "NonNegativeCount"
VERDICTS = ("holds", "the opposite holds", "cannot be decided", "the warm-up does not fit", "not measured yet")
LONGEST_NAME = 200
"""Maximum length in letters of the name of a method or a comparison, which figures show."""
PLANNED = (3, 5, 10, 20)
"""Numbers of seeds of the power analysis."""
LINE = 0.3
"""Height of a method's line, in inches."""
Rows = list[list[str | Cell]]
T = TypeVar("T")


def write_page(folder: Path, page: Path | None, command: str, newer: Mapping[str, Any] = {}) -> tuple[Path, Path]:
    """Write index.html to the folder of a lab, and the Markdown page with its pictures. Returns both paths.

    page: file of the Markdown; the folder next to it, named like it, has its pictures, and the paragraphs of its notes
        in notes.txt. None: lab.md in the folder of the lab.
    command: the command that runs the lab, shown on the page. newer: facts that replace those of lab.json.

    Raises ConfigError if nothing is finished.
    """
    lab, page, index = read_lab(folder, newer), page or folder / PAGE, folder / "index.html"
    facts, world = lab.facts, lab.comparisons[0].facts
    records = [seed.record for part in lab.comparisons for method in part.methods for seed in method.seeds]
    stopped = ", stopped early at rungs" if facts.get("rungs", True) else ""
    lead = [
        f"Every method has the same search: {facts['trials']} points of its ranges{stopped}, "
        f"chosen on a validation split. The winner is trained with {facts['seeds']} fresh seeds and judged "
        "on a test split. The scenes show two objects; the probability of every caption given a scene is known, so "
        "that the pointwise mutual information (PMI) of every image and caption is exact "
        f"({world['scenes']} scenes, {world['captions']} captions in the first world). Accuracy is the mean of "
        "three tasks: zero-shot (the best of the objects' names is in the scene) and the mean reciprocal rank of "
        "captions and of images. The PMI as a score is a reference, no bound: its equal scores share a mean rank, "
        "whose reciprocal is below the mean of the reciprocal ranks that scores without ties get. Numbers in brackets "
        "are 95 % intervals over seeds.",
    ]
    planned = int(facts["seeds"]) * sum(len(part["methods"]) for part in facts["comparisons"])
    if len(records) < planned:
        lead.append(f"The lab is not finished: {len(records)} of {planned} trainings of winners are done.")
    revisions = sorted({record.revision for record in records}, key=str)
    winner_revisions = ", ".join(name or "a revision that the records do not name" for name in revisions)
    page_revision = revision() or "a revision that is not known"
    notes_file = io.below(page.parent, f"{page.stem}/{NOTES}")
    notes = io.read_text(notes_file, io.MB).strip().split("\n\n") if notes_file.exists() else []
    sections = [
        replace(section, figures=[replace(figure, file=f"{page.stem}/{figure.file}") for figure in section.figures])
        for section in _sections(lab, notes)
    ]
    last = Section(text=[f"Winners trained at {winner_revisions}; page made at {page_revision}."])
    write(facts["title"], [page, index], [Section(text=[*lead, Span(command, "command")]), *sections, last])
    return page, index


def _sections(lab: Lab, notes: Sequence[str]) -> Iterator[Section]:
    """Yield the sections of the page; files of figures are relative to the folder of its pictures."""
    claims, deltas, baseline = verdicts(lab), from_baseline(lab), lab.facts["baseline"]
    scales = lab.facts.get("scales")
    if scales:
        for compared in lab.comparisons:
            yield from _scaling(compared)
    if claims:
        yield _claims(claims)
    if notes:
        yield Section("Why" if claims else "Notes", [" ".join(note.split()) for note in notes])
    if deltas:
        separated = [item for item in deltas if item.is_separated]
        above, below = (
            ", ".join(f"{item.label} ({item.group})" for item in separated if sign * item.interval.estimate > 0)
            for sign in (1, -1)
        )
        text = (
            f"Separated after Holm's correction for all lines: above {baseline} {above or 'none'}; below "
            f"{below or 'none'}. Intervals over seeds say what another training would reach; those over samples, of "
            "outcomes averaged over the seeds, what another test split would. Detectable: by as many seeds, with 80 % "
            "probability."
        )
        rows: Rows = [
            [
                item.group, item.label, f"{item.interval.estimate:+.1f}", _ends(item.interval), _ends(item.samples),
                f"{item.p:.2g}", Cell("yes" if item.is_separated else "no", bold=item.is_separated),
                f"{item.detectable:.1f}",
            ]
            for item in deltas
        ]  # fmt: skip
        labels = ["comparison", "method", "difference", "95 % over seeds", "95 % over samples", "p (Holm)",
                  "separated", "detectable"]  # fmt: skip
        picture = Picture("differences with intervals", difference_figure(deltas, baseline), file="differences.png")
        yield Section(f"Differences from {baseline}", [text], [text_table(labels, rows, left=2, wrap=True)], [picture])
    for compared in lab.comparisons:
        results, *others = _compared(compared)
        yield results
        yield from () if scales or compared.facts["budget"] > 1 else others
    if deltas:
        # By number of seeds, at the spread of each comparison.
        rows = []
        for compared in lab.comparisons:
            spreads = [item.deviation for item in deltas if item.group == compared.name and item.deviation is not None]
            if spreads:
                spread = math.sqrt(sum(value**2 for value in spreads) / len(spreads))
                sizes = [statistics.detectable_difference(spread, count, deltas[0].level) for count in PLANNED]
                rows.append([compared.name, f"{spread:.1f}", *(f"{size:.1f}" for size in sizes)])
        labels = ["comparison", "deviation over seeds", *(f"{count} seeds" for count in PLANNED)]
        yield Section(
            "What the seeds can show",
            ["The smallest difference in accuracy, in percent points, that a t-test of two methods shows with 80 % "
             f"probability, at the spread over seeds that was measured and the level {deltas[0].level:.2g}: 5 % "
             f"divided by the {len(deltas)} differences from {baseline}, which Holm's method asks of the smallest p. "
             "Larger p-values of the same table may pass at a less strict level."],
            [text_table(labels, rows, left=1, wrap=True)],
        )  # fmt: skip
    rows = []
    for compared in lab.comparisons:
        for method in compared.methods:
            chosen = []
            for key, value in method.winner.items():
                short = key.removeprefix("optim.schedule.").removeprefix("head.").removeprefix("objective.")
                chosen.append(f"{short}={value:.3g}" if isinstance(value, float) else f"{short}={value}")
            best = f"{max(method.trials):.1f}" if method.trials else ""
            finished = f"{len(method.trials)} of {lab.facts['trials']}"
            seeds = str(len(method.seeds)) + (f", {method.failed} diverged" if method.failed else "")
            rows.append([compared.name, method.name, finished, best, seeds, Cell(", ".join(chosen), code=True)])
    labels = ["comparison", "method", "finished", "best, validation %", "seeds", "chosen"]
    yield Section(
        "What the searches chose",
        ["Trials that are not finished were stopped at a rung, or diverged. Comparisons without trials have the "
         "settings that the search with fewer steps chose."],
        [text_table(labels, rows, left=2, wrap=True)],
    )  # fmt: skip


def _claims(claims: Sequence[Verdict]) -> Section:
    """The verdict on every claim at every budget, and the differences over budgets."""
    budgets = sorted({item.steps for item in claims})
    counts = []
    for steps in budgets:
        found = Counter(item.verdict for item in claims if item.steps == steps)
        counts.append(f"after {steps:,} steps {', '.join(f'{name} {found[name]}' for name in VERDICTS if found[name])}")
    rows: Rows = []
    for number, item in enumerate(claims):
        claim, measured, metric, numbers = item.claim, item.measured, item.claim["metric"], ["", "", ""]
        pair = f"{claim['better']} - {claim['than']}, {(TASKS | SIMILARITY)[metric]}"
        said = [claim["says"], claim["source"], pair, claim["comparison"]]
        if number and claims[number - 1].claim is claim:
            said = [""] * len(said)
        if measured is not None:
            interval = measured.interval.text("+.1f" if metric in TASKS else "+.3f")
            numbers = [str(measured.seeds), interval, f"{measured.p:.2g}"]
        rows.append([*said, f"{item.steps:,}", *numbers, Cell(item.verdict, bold=item.is_decided), item.power])
    labels = ["claim", "source", "compared", "data", "steps", "seeds", "difference and 95 % interval", "p (Holm)",
              "at this budget, on this data", "what it takes"]  # fmt: skip
    crossed = [
        f"{after.claim['better']} - {after.claim['than']} on {after.claim['comparison']} between {before.steps:,} and "
        f"{after.steps:,} steps"
        for before, after in itertools.pairwise(claims)
        if before.claim is after.claim and before.sign * after.sign < 0
    ]
    text = [
        f"{len({item.claim['says'] for item in claims})} claims: {'; '.join(counts)}. A claim holds, or its opposite "
        "does, if Welch's test over seeds separates the two methods, after Holm's correction for all lines of the "
        "table. The last column says how small a difference the seeds show with 80 % probability and, for a claim that "
        "cannot be decided, how many seeds of each method the measured difference needs if it and the measured spread "
        "are the true ones; both at 5 % divided by the number of lines, the level at which Holm's method tests the "
        "smallest p. There is no verdict where the recipe of the source warms up for more steps than the training has.",
    ]
    pictures = []
    if len(budgets) > 1:
        text.append(
            "In the figure, claims hold at green points and their opposites at red ones; at hollow ones the warm-up "
            "does not fit. Signs that change with the budget, both intervals without zero: "
            f"{'; '.join(crossed) or 'none'}."
        )
        pictures = [Picture("differences over budgets", claims_figure(claims), file="budgets.png")]
    table = text_table(labels, rows, left=len(labels), wrap=True)
    return Section("Which claims of the papers hold here", text, [table], pictures)


def _scaling(compared: Compared) -> Iterator[Section]:
    """Power laws in the axes that the scales of the lab vary."""
    trainings = []
    for method in compared.methods:
        for seed in method.seeds:
            record = seed.record
            pairs = (line.partition("=") for line in record.overrides if not line.startswith("seed="))
            metrics = {key.metric: value for key, value in record.metrics.items() if key.task == "test"}
            values = {"test loss": metrics[LOSS], "error, accuracy": 100 - metrics[ACCURACY]}
            values["distance from the PMI"] = metrics["error"]
            settings = {key: yaml.safe_load(value) for key, _, value in pairs}
            flops, samples = (float(record.training[name]) for name in ("flops", "samples"))
            trainings.append(Training(f"{method.name}, seed {record.seed}", settings, flops, samples, values))
    oracle = compared.facts["oracle"]
    # The metrics of the PMI itself, for comparison with the laws.
    best = f"The PMI itself has a loss of {oracle[LOSS]:.2f} nats and an error of {100 - oracle[ACCURACY]:.1f} %."
    for axis in (COMPUTE, SAMPLES, WIDTH):
        try:
            laws = curves(trainings, axis)
        except ConfigError:  # the scales of this lab do not vary the axis
            continue
        yield Section(
            f"Power laws in {axis}: {compared.name}",
            [f"{scaling_page.lead(axis, laws)} {best}"],
            [scaling_page.table(laws)],
            [Picture(f"{compared.name}: power laws in {axis}", scaling_page.figure(laws, axis),
                     file=f"{compared.name}/scaling_{axis}.png")],
        )  # fmt: skip


def _compared(compared: Compared) -> Iterator[Section]:
    """Yield the results of a comparison, then its other sections."""
    name, facts, methods = compared.name, compared.facts, compared.methods
    missing = [f"Not trained yet: {', '.join(compared.missing)}."] if compared.missing else []
    best = {task: max(method.interval(task).estimate for method in methods) for task in TASKS}
    rows: Rows = []
    for method in methods:
        accuracies = [(method.interval(task), best[task]) for task in TASKS]
        cells = [Cell(item.text(".1f", 0, 100), bold=item.estimate == most) for item, most in accuracies]
        rows.append([method.name, str(len(method.seeds)), *cells])
    rows.append(["the PMI itself", "", *(f"{facts['oracle'][task]:.1f}" for task in TASKS)])
    labels = ["method", "seeds", *(f"{title}, %" for title in TASKS.values())]
    curves = [Picture(f"{name}: accuracy over training", curve_figure(compared), file=f"{name}/curves.png")]
    yield Section(
        f"World {facts['world']}, towers {facts['tower']}" + (f", {facts['steps']:,} steps" * (facts["budget"] > 1)),
        [f"Mutual information of scene and caption: {facts['information']:.2f} nats. Guessing reaches "
         f"{facts['chance']:.0f} % in zero-shot.", *missing],
        [text_table(labels, rows, left=1, wrap=True)],
        curves if len(methods[0].steps) > 1 else (),
    )  # fmt: skip

    rows = [[method.name, *(method.interval(name).text(".2f") for name in SIMILARITY)] for method in methods]
    rows.append(["the PMI itself", "1", "1", "0", "0"])
    yield Section(
        "Agreement with the pointwise mutual information",
        ["Scores of test images with all captions of the world, half of the weight on matched pairs and half on "
         "independent ones. A score is as good as the PMI up to a constant. The slope predicts the PMI from the score: "
         "1 is calibrated, below 1 the scores are too far apart."],
        [text_table(["method", *SIMILARITY.values()], rows, left=1, wrap=True)],
        [Picture(f"{name}: agreement with the PMI", similarity_figure(compared), file=f"{name}/similarity.png")],
        level=3,
    )  # fmt: skip

    rows = [[method.name, *(f"{np.mean(method.values(key, 'start')):.3g}" for key in START)] for method in methods]
    yield Section(
        "Scores before the first step",
        ["Logits of a batch of training pairs: their mean and standard deviation, and the standard deviation of what "
         "is left without the means of images and of captions, which alone tells pairs apart; the loss, and the norm "
         "of its gradient. A large spread saturates the softmax, one near zero leaves nothing to learn from."],
        [text_table(["method", *START.values()], rows, left=1, wrap=True)],
        level=3,
    )  # fmt: skip

    front = pareto(methods, "flops")
    rows = [
        [
            f"{method.name} *" if method in front else method.name, f"{method.cost('flops') / 1e9:,.0f}",
            f"{method.cost('samples'):,.0f}", f"{method.cost('processor'):.1f}",
            f"{method.interval(ACCURACY).estimate:.1f}",
        ]
        for method in sorted(methods, key=lambda method: method.cost("flops"))
    ]  # fmt: skip
    labels = ["method", "GFLOPs", "samples", "CPU seconds", "accuracy, %"]
    yield Section(
        "Accuracy against cost",
        ["A star marks methods that no method of fewer operations surpasses."],
        [text_table(labels, rows, left=1, wrap=True)],
        [Picture(f"{name}: accuracy against cost", pareto_figure(compared), file=f"{name}/cost.png")],
        level=3,
    )


@dataclass(frozen=True)
class Seed:
    """A finished training of a winner with a fresh seed.

    curve: accuracy on validation by step. outcomes: of the test samples by task, each [n] in [0, 1].
    """

    record: RunRecord
    curve: Mapping[float, float]
    outcomes: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Method:
    """A method of a comparison.

    failed: number of trainings of the winner that diverged; the others are `seeds`. winner: values of the searched
    keys. trials: accuracy on validation of each whole trial.
    """

    name: str
    seeds: tuple[Seed, ...]
    failed: int
    winner: Mapping[str, Any]
    trials: tuple[float, ...]

    def values(self, metric: str, split: str = "test") -> list[float]:
        """Return a metric of every seed."""
        return [seed.record.metrics[MetricKey(split, "", "", metric)] for seed in self.seeds]

    def cost(self, name: str) -> float:
        """Return a mean cost of a training."""
        return float(np.mean([seed.record.training[name] for seed in self.seeds]))

    @property
    def steps(self) -> list[float]:
        """Steps at which all seeds were evaluated."""
        return sorted(set.intersection(*(set(seed.curve) for seed in self.seeds)))

    def interval(self, metric: str) -> Interval:
        """Return the mean of a metric of the test split over the seeds, with its 95 % interval."""
        return statistics.over_seeds(self.values(metric))

    @cached_property
    def mean_outcomes(self) -> dict[str, np.ndarray]:
        """By task, the mean outcome of each test sample over the seeds, in [0, 1]."""
        return {task: np.mean([seed.outcomes[task] for seed in self.seeds], axis=0) for task in self.seeds[0].outcomes}


@dataclass(frozen=True)
class Compared:
    """The methods of a comparison that have a finished seed.

    facts: facts of the world, with `oracle`, the metrics of the pointwise mutual information as a score, and `chance`,
    the zero-shot accuracy of guessing. missing: methods without a finished seed.
    """

    name: str
    facts: Mapping[str, Any]
    methods: tuple[Method, ...]
    missing: tuple[str, ...]

    def method(self, name: str) -> Method | None:
        return next((method for method in self.methods if method.name == name), None)


@dataclass(frozen=True)
class Lab:
    """facts: content of lab.json. comparisons: with at least one finished seed."""

    facts: Mapping[str, Any]
    comparisons: tuple[Compared, ...]


def read_lab(folder: Path, newer: Mapping[str, Any] = {}) -> Lab:
    """Read a lab. newer: facts that replace those of lab.json. Raises ConfigError if nothing is finished."""
    path = folder / MANIFEST
    if not path.exists():
        raise ConfigError(f"{folder} holds no lab: run clipzoo lab --output {folder} first")
    facts = {**io.read_json(path, 16 * io.MB, "run the same clipzoo lab command again"), **newer}
    io.require_fields(path, facts, kinds_of(FACTS))
    for claim in facts["claims"]:
        io.require_fields(path, claim, kinds_of({**CLAIM, "metric": f"Literal{[*METRICS]}"}))
    damage = io.DamageLog()
    parts = []
    for node in facts["comparisons"]:
        io.require_fields(path, node, kinds_of(COMPARISON))
        io.require_fields(path, node["oracle"], kinds_of(dict.fromkeys(TASKS, PERCENT) | {LOSS: NUMBER}))
        io.below(folder, node["name"])  # the folder of its figures
        for item in node["methods"]:
            io.require_fields(path, item, kinds_of(METHOD))
        for name in (node["name"], *(item["name"] for item in node["methods"])):
            if len(name) > LONGEST_NAME:
                raise io.DamagedFileError(path, f"has a name of {len(name)} letters, more than {LONGEST_NAME}")
        samples: dict[str, int] = {}
        methods = [_read_method(io.below(folder, item["folder"]), item, samples, damage) for item in node["methods"]]
        trained = tuple(method for method in methods if method.seeds)
        if trained:
            missing = tuple(method.name for method in methods if not method.seeds)
            parts.append(Compared(node["name"], node, trained, missing))
    if not parts:
        raise ConfigError(f"no winner of {folder} is trained yet: let clipzoo lab run on")
    return Lab(facts, tuple(parts))


def _read_method(folder: Path, facts: Mapping[str, Any], samples: dict[str, int], damage: io.DamageLog) -> Method:
    def read(kind: str, read_one: Callable[[Path], T]) -> list[T]:
        runs = sorted(filter(is_finished, folder.glob(f"{kind}-*")), key=lambda run: (len(run.name), run.name))
        return [record for run in runs if (record := damage.read(partial(read_one, run), None)) is not None]

    seeds, trials = read("seed", partial(_read_seed, samples=samples)), read("trial", read_run)
    whole = tuple(seed for seed in seeds if is_whole(seed.record))
    lines = {line for seed in seeds for line in seed.record.overrides}
    winners = (point for point in facts["points"] if {f"{key}={value}" for key, value in point.items()} <= lines)
    accuracies = tuple(record.metrics[BEST] for record in trials if is_whole(record))
    return Method(facts["name"], whole, len(seeds) - len(whole), next(winners, {}), accuracies)


def _read_seed(run: Path, samples: dict[str, int]) -> Seed:
    """Read a run. samples: numbers of outcomes by task, which all runs of a comparison share."""
    record = read_run(run)
    if not is_whole(record):
        return Seed(record, {}, {})
    path = run / "evaluation" / OUTCOMES
    outcomes = read_arrays(path)
    for task, values in outcomes.items():
        if values.dtype.kind not in "fiu" or values.ndim != 1 or not ((values >= 0) & (values <= 1)).all():
            raise io.DamagedFileError(path, f"has {task} that is not a list of numbers from 0 to 1")
    counts = {task: len(values) for task, values in outcomes.items()}
    if not counts or counts != (samples or counts):
        raise io.DamagedFileError(path, f"has {counts or 'no'} outcomes, other runs {samples}")
    samples.update(counts)
    return Seed(record, curve_of(run), outcomes)


def curve_of(run: Path) -> dict[float, float]:
    """Return the accuracy on validation by step. Raises DamagedFileError for a wrong step or accuracy."""
    lines = [line for line in TrainingLog.read(run).evaluations if str(BEST) in line]
    for line in lines:
        io.require_fields(run / LOG, line, kinds_of({"step": "Count", str(BEST): PERCENT}))
    return {float(line["step"]): float(line[str(BEST)]) for line in lines}


def read_run(run: Path) -> RunRecord:
    """Read the record of a trial or of a seed. Raises DamagedFileError, also for a number that the page needs."""
    record = RunRecord.read(run)
    if is_whole(record):
        kinds = {str(BEST): PERCENT}
        if not run.name.startswith("trial"):
            kinds = {f"test/{name}": PERCENT if name in TASKS else NUMBER for name in (*TASKS, *SIMILARITY)}
            kinds |= {f"start/{name}": NUMBER for name in START} | {f"test/{LOSS}": NUMBER}
            kinds |= dict.fromkeys(("flops", "samples", "processor"), COST)
        metrics = {str(key): value for key, value in record.metrics.items()}
        io.require_fields(run / FILE, metrics | dict(record.training), kinds_of(kinds))
    return record


def is_whole(record: RunRecord) -> bool:
    """Return True if a training neither diverged nor was stopped at a rung."""
    return ENDED_EARLY not in record.training


def difference(compared: Compared, name: str, other: str, metric: str) -> Difference | None:
    """Return method `name` - method `other`, p not adjusted yet; None with fewer than two seeds of either."""
    before, after = compared.method(other), compared.method(name)
    if before is None or after is None or min(len(before.seeds), len(after.seeds)) < 2:
        return None
    outcomes, samples = (before.mean_outcomes, after.mean_outcomes), None
    tasks = list(outcomes[1]) if metric == ACCURACY else [metric] if metric in outcomes[1] else []
    if tasks:
        # The paired bootstrap over test samples: all outcomes of one image, or of its caption, are one cluster.
        clusters = np.concatenate([np.arange(len(outcomes[1][task])) for task in tasks])
        first, second = (100 * np.concatenate([side[task] for task in tasks]) for side in outcomes)
        samples = statistics.paired_difference(first, second, clusters)
    values = before.values(metric), after.values(metric)
    return statistics.seeds_difference(metric, compared.name, name, *values, samples)


def from_baseline(lab: Lab) -> list[Difference]:
    """Return the differences in accuracy of all methods from the baseline of their comparison, adjusted together."""
    baseline = lab.facts["baseline"]
    pairs = [(compared, method.name) for compared in lab.comparisons for method in compared.methods]
    differences = [difference(compared, name, baseline, ACCURACY) for compared, name in pairs if name != baseline]
    return statistics.adjusted([item for item in differences if item])


@dataclass(frozen=True)
class Verdict:
    """A claim of a paper at a budget and its difference there; None as long as trainings are missing."""

    claim: Mapping[str, Any]
    steps: int
    measured: Difference | None

    @property
    def sign(self) -> int:
        """1 or -1 if the interval of the difference is above or below zero, else 0."""
        interval = self.measured.interval if self.measured else Interval(0.0, 0.0, 0.0)
        return (interval.low > 0) - (interval.high < 0)

    @property
    def is_decided(self) -> bool:
        return self.verdict in VERDICTS[:2]

    @property
    def verdict(self) -> str:
        holds, opposite, undecided, short, missing = VERDICTS
        if self.steps < self.claim["warmup"]:
            return short
        if self.measured is None:
            return missing
        if not self.measured.is_separated:
            return undecided
        is_higher = self.measured.interval.estimate > 0
        return holds if is_higher != (self.claim["metric"] in ("error", "calibrated_error")) else opposite

    @property
    def power(self) -> str:
        """Smallest difference that the seeds can show, and the number of seeds for the measured one."""
        if self.steps < self.claim["warmup"]:
            return f"a warm-up of {self.claim['warmup']:,} steps"
        if self.measured is None:
            return ""
        metric = self.claim["metric"]
        unit = "points" if metric in TASKS else SIMILARITY[metric].partition(", ")[2]
        text = f"{self.measured.seeds} seeds show {self.measured.detectable:.2g} {unit}".rstrip()
        if self.measured.is_separated:
            return text
        needed = self.measured.seeds_needed
        return f"{text}; this difference needs {f'over {statistics.MOST_SEEDS}' if needed is None else needed}"


def verdicts(lab: Lab) -> list[Verdict]:
    """Return the claims of a lab at each budget with their differences, adjusted for all of them together."""
    parts = {compared.name: compared for compared in lab.comparisons}
    found = []
    for claim, node in itertools.product(lab.facts["claims"], lab.facts["comparisons"]):
        if node["name"] in (claim["comparison"], f"{claim['comparison']}-x{node['budget']}"):
            pair = claim["better"], claim["than"], claim["metric"]
            measured = difference(parts[node["name"]], *pair) if node["name"] in parts else None
            found.append(Verdict(claim, node["steps"], measured))
    adjusted = iter(statistics.adjusted([item.measured for item in found if item.measured]))
    return [replace(item, measured=next(adjusted)) if item.measured else item for item in found]


def pareto(methods: Sequence[Method], name: str) -> list[Method]:
    """Return the methods that no other one surpasses in accuracy at the same or a lower cost."""
    points = [(method.cost(name), method.interval(ACCURACY).estimate) for method in methods]
    trials = [Trial(number, {}, "finished", (), results=point) for number, point in enumerate(points)]
    return [methods[trial.number] for trial in front(trials, ["minimize", "maximize"])]


def _ends(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval.low:+.1f} to {interval.high:+.1f}"


def difference_figure(found: Sequence[Difference], baseline: str) -> Figure:
    """Differences of all comparisons from the baseline; coloured where they are separated."""
    names = list(dict.fromkeys(item.group for item in found))
    groups = [[item for item in found if item.group == name] for name in names]
    height, ratios = LINE * len(found) + 0.62 * len(names) + 0.4, list(map(len, groups))
    figure, axes = panels(9, height, len(names), sharex=True, height_ratios=ratios)
    for panel, name, group in zip(axes, names, groups, strict=True):
        for place, item in enumerate(group):
            shade = MUTED if not item.is_separated else RIGHT if item.interval.estimate > 0 else WRONG
            panel.plot([item.interval.low, item.interval.high], [place, place], color=shade, linewidth=2)
            panel.plot(item.interval.estimate, place, "o", color=shade, markersize=6)
        _lines(panel, [item.label for item in group])
        panel.axvline(0, color=INK, linewidth=1)
        label(panel, name, size=9)
    panel.set_xlabel(f"accuracy less that of {baseline}, percent points (95 % over seeds)", fontsize=8)
    return figure


def claims_figure(claims: Sequence[Verdict]) -> Figure:
    """The difference of each claim over the steps of a training; hollow where the recipe's warm-up does not fit."""
    groups = [list(group) for _, group in itertools.groupby(claims, key=lambda item: id(item.claim))]
    figure, axes = tiles(len(groups), 4, 3, 2.1)
    for panel, group in zip(axes, groups, strict=True):
        claim, shown = group[0].claim, [(item, item.measured.interval) for item in group if item.measured]
        panel.plot([item.steps for item, _ in shown], [interval.estimate for _, interval in shown], color=MUTED)
        for item, interval in shown:
            fill = "full" if item.steps >= claim["warmup"] else "none"
            shade = {VERDICTS[0]: RIGHT, VERDICTS[1]: WRONG}.get(item.verdict, MUTED)
            panel.plot([item.steps] * 2, [interval.low, interval.high], color=shade, linewidth=2)
            panel.plot(item.steps, interval.estimate, "o", color=shade, markersize=6, fillstyle=fill)
        panel.axhline(0, color=INK, linewidth=1)
        panel.set_xscale("log")
        panel.set_xlim(group[0].steps / 1.3, group[-1].steps * 1.3)
        panel.set_xticks([item.steps for item in group], [f"{item.steps:,}" for item in group])
        panel.minorticks_off()
        title = f"{claim['better']}\n- {claim['than']}"
        label(panel, title, "steps", f"{(TASKS | SIMILARITY)[claim['metric']]}, {claim['comparison']}", 8, grid="y")
    return figure


def similarity_figure(compared: Compared) -> Figure:
    """How well scores follow the PMI: a panel for each measure, a line for each method, a dot for each seed."""
    measures = (("rank_correlation", "rank correlation", 1.0), ("slope", "slope of the PMI on the score", 1.0),
                ("error", "error, nats", 0.0))  # fmt: skip
    methods = compared.methods
    figure, axes = panels(11, LINE * len(methods) + 0.9, columns=3, sharey=True)
    for panel, (metric, title, ideal) in zip(axes, measures, strict=True):
        for place, method in enumerate(methods):
            interval = method.interval(metric)
            panel.plot(method.values(metric), [place] * len(method.seeds), "o", color=MUTED, markersize=4)
            panel.plot([interval.low, interval.high], [place, place], color=INK, linewidth=1.5)
            panel.plot(interval.estimate, place, "|", color=INK, markersize=11, markeredgewidth=2)
        panel.axvline(ideal, color=RIGHT, linewidth=1, linestyle="--")
        _lines(panel, [method.name for method in methods])
        label(panel, title)
    return figure


def pareto_figure(compared: Compared) -> Figure:
    """Accuracy against two costs of a training; a line joins the methods that no cheaper one surpasses."""
    figure, axes = panels(12, 4.0, columns=2, sharey=True)
    costs = (("flops", "GFLOPs of a training", 1e-9), ("processor", "CPU seconds of a training", 1.0))
    for panel, (name, title, factor) in zip(axes, costs, strict=True):
        for number, method in enumerate(compared.methods):
            interval = method.interval(ACCURACY)
            half = interval.high - interval.estimate if np.isfinite(interval.high) else 0.0
            panel.errorbar(
                factor * method.cost(name), interval.estimate, half, fmt="os^Dv"[number // 10], color=colour(number),
                markersize=5, elinewidth=1, label=method.name,
            )  # fmt: skip
        front = sorted(pareto(compared.methods, name), key=lambda method: method.cost(name))
        points = [(factor * method.cost(name), method.interval(ACCURACY).estimate) for method in front]
        panel.plot(*zip(*points, strict=True), color=INK, linewidth=1, zorder=0)
        label(panel, "", title, "accuracy, %", grid="y")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    return figure


def curve_figure(compared: Compared) -> Figure:
    """Accuracy on validation over training: mean and standard deviation over seeds."""
    figure, (panel,) = panels(9, 4.0)
    for number, method in enumerate(compared.methods):
        steps = np.array(method.steps)
        values = np.array([[seed.curve[step] for step in method.steps] for seed in method.seeds])
        means, spreads = values.mean(axis=0), values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(steps))
        panel.plot(steps, means, "os^Dv"[number // 10] + "-", color=colour(number), markersize=4, label=method.name)
        panel.fill_between(steps, means - spreads, means + spreads, color=colour(number), alpha=0.15, linewidth=0)
    label(panel, "", "step", "accuracy on validation, %", grid="y")
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    return figure


def _lines(panel: Axes, names: Sequence[str]) -> None:
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.set_ylim(len(names) - 0.5, -0.5)
    style(panel, grid="x")
