"""The page of a lab as Markdown with pictures beside it, and as one HTML file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from clipzoo.io import below, write_whole
from clipzoo.io.text import save_figure
from clipzoo.report import render
from clipzoo.report.comparison import scaling_page
from clipzoo.report.drawing import DPI
from clipzoo.report.lab import figures, tables
from clipzoo.report.lab.claims import Difference, Verdict, from_baseline, verdicts
from clipzoo.report.lab.records import Compared, Lab, read_lab
from clipzoo.report.lab.scaling import best, laws
from clipzoo.report.table import Table
from clipzoo.runs.record import revision

PAGE = "lab.md"


@dataclass(frozen=True)
class Part:
    """A part of the page: paragraphs, then tables, then pictures by file name, with their descriptions."""

    title: str
    text: Sequence[str]
    tables: Sequence[Table] = ()
    pictures: Sequence[tuple[str, str, Figure]] = ()
    level: int = 2


def write_page(
    folder: Path, page: Path | None, command: str, newer: Mapping[str, Any] | None = None
) -> tuple[Path, Path]:
    """Write index.html to the folder of a lab, and the Markdown page with its pictures. Returns both paths.

    page: of the Markdown; its pictures lie beside it in folders below one of its name. None: lab.md in the folder of
        the lab.
    command: that runs the lab, for the page. newer: facts that replace those of lab.json.

    Raises:
        ConfigError: nothing is finished.
    """
    lab = read_lab(folder, newer)
    page = page or folder / PAGE
    parts = list(_parts(lab))
    shared = {"title": lab.facts["title"], "lead": _lead(lab), "command": command, "revisions": _revisions(lab)}
    for part in parts:
        for name, _, figure in part.pictures:
            save_figure(figure, below(page.with_suffix(""), f"{name}.png"), dpi=DPI)
    write_whole(page, render.markdown_page("lab.md.j2", parts=parts, pictures=page.stem, **shared))
    shown = [
        (part, [(description, render.picture(figure)) for _, description, figure in part.pictures]) for part in parts
    ]
    index = folder / "index.html"
    write_whole(index, render.html_page("lab.html.j2", parts=shown, **shared))
    return page, index


def _lead(lab: Lab) -> list[str]:
    worlds = lab.comparisons[0].facts
    stopped = ", stopped early at rungs" if lab.facts.get("rungs", True) else ""
    text = [
        f"Every method has the same search: {lab.facts['trials']} points of its ranges{stopped}, "
        f"chosen on a validation split. The winner is trained with {lab.facts['seeds']} fresh seeds and judged "
        "on a test split. The scenes show two objects; the probability of every caption given a scene is known, so "
        "that the pointwise mutual information (PMI) of every image and caption is exact "
        f"({worlds['scenes']} scenes, {worlds['captions']} captions in the first world). Accuracy is the mean of "
        "three tasks: zero-shot (the best of the objects' names is in the scene) and the mean reciprocal rank of "
        "captions and of images. The PMI as a score is a reference, no bound: its equal scores share a mean rank, "
        "whose reciprocal is below the mean of the reciprocal ranks that scores without ties get. Numbers in brackets "
        "are 95 % intervals over seeds.",
    ]
    if lab.trainings < lab.planned:
        text.append(f"The lab is not finished: {lab.trainings} of {lab.planned} trainings of winners are done.")
    return text


def _revisions(lab: Lab) -> str:
    """Say which code trained and which made the page."""
    trained = [name or "a revision that the records do not name" for name in lab.revisions]
    return f"Winners trained at {', '.join(trained)}; page made at {revision() or 'a revision that is not known'}."


def _parts(lab: Lab) -> Iterator[Part]:
    claims, found = verdicts(lab), from_baseline(lab)
    if lab.facts.get("scales"):
        yield from (part for compared in lab.comparisons for part in _scaling(compared))
    if claims:
        yield Part("Which claims of the papers hold here", _said(claims), [tables.claims(claims)])
    if lab.facts["notes"]:
        yield Part("Why" if claims else "Notes", lab.facts["notes"])
    if found:
        yield Part(
            f"Differences from {lab.baseline}",
            [_separated(found, lab.baseline)],
            [tables.differences(found, lab.baseline)],
            [("differences", "differences with intervals", figures.difference_figure(found, lab.baseline))],
        )
    for compared in lab.comparisons:
        yield from _results(compared) if lab.facts.get("scales") else _compared(compared)
    if found:
        yield Part(
            "What the seeds can show",
            ["The smallest difference in accuracy, in percent points, that a t-test of two methods shows with 80 % "
             f"probability, at the spread over seeds that was measured and the level {found[0].level:.2g}: 5 % divided "
             f"by the {len(found)} differences from {lab.baseline}, which Holm's method asks of the smallest p. "
             "Larger p-values of the same table may pass at a less strict level."],
            [tables.power(lab, found)],
        )  # fmt: skip
    yield Part(
        "What the searches chose",
        ["Trials that are not finished were stopped at a rung, or diverged."],
        [tables.searches(lab)],
    )


def _scaling(compared: Compared) -> Iterator[Part]:
    for axis, found in laws(compared):
        name = f"{compared.name}/scaling_{axis}"
        yield Part(
            f"Power laws in {axis}: {compared.name}",
            [f"{scaling_page.lead(axis, found)} {best(compared)}"],
            [scaling_page.table(found)],
            [(name, f"{compared.name}: power laws in {axis}", scaling_page.figure(found, axis))],
        )


def _results(compared: Compared) -> Iterator[Part]:
    facts = compared.facts
    missing = [f"Not trained yet: {', '.join(compared.missing)}."] if compared.missing else []
    yield Part(
        f"World {facts['world']}, towers {facts['tower']}",
        [f"Mutual information of scene and caption: {facts['information']:.2f} nats. Guessing reaches "
         f"{facts['chance']:.0f} % in zero-shot.", *missing],
        [tables.results(compared)],
        [(f"{compared.name}/curves", f"{compared.name}: accuracy over training", figures.curve_figure(compared))]
        if len(compared.methods[0].seeds[0].curve) > 1 else (),
    )  # fmt: skip


def _compared(compared: Compared) -> Iterator[Part]:
    name = compared.name
    yield from _results(compared)
    yield Part(
        "Agreement with the pointwise mutual information",
        ["Scores of test images with all captions of the world, half of the weight on matched pairs and half on "
         "independent ones. A score is as good as the PMI up to a constant. The slope predicts the PMI from the score: "
         "1 is calibrated, below 1 the scores are too far apart."],
        [tables.similarity(compared)],
        [(f"{name}/similarity", f"{name}: agreement with the PMI", figures.similarity_figure(compared))],
        level=3,
    )  # fmt: skip
    yield Part(
        "Scores before the first step",
        ["Logits of a batch of training pairs: their mean and standard deviation, and the standard deviation of what "
         "is left without the means of images and of captions, which alone tells pairs apart; the loss, and the norm "
         "of its gradient. A large spread saturates the softmax, one near zero leaves nothing to learn from."],
        [tables.start(compared)],
        level=3,
    )  # fmt: skip
    yield Part(
        "Accuracy against cost",
        ["A star marks methods that no method of fewer operations surpasses."],
        [tables.cost(compared, tables.pareto(compared.methods, "flops"))],
        [(f"{name}/cost", f"{name}: accuracy against cost", figures.pareto_figure(compared))],
        level=3,
    )


def _said(claims: Sequence[Verdict]) -> list[str]:
    """Sum the verdicts up in sentences."""
    names = {"holds": "confirmed", "the opposite holds": "contradicted", "cannot tell": "left open",
             "not measured yet": "not measured yet"}  # fmt: skip
    counts = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in names}
    summary = ", ".join(f"{count} {names[verdict]}" for verdict, count in counts.items() if count)
    text = [
        f"{len(claims)} claim{'s' * (len(claims) != 1)}: {summary}. A claim holds or is contradicted if Welch's test "
        "over seeds separates the two methods, after Holm's correction for all claims. The power column says how "
        "small a difference the seeds show with 80 % probability and, for a claim left open, how many seeds of each "
        "method the measured difference needs if it and the measured spread are the true ones; both at 5 % divided by "
        "the number of claims, the level at which Holm's method tests the smallest p."
    ]
    separated = [claim for claim in claims if claim.measured is not None and claim.measured.is_separated]
    text += [
        f"{claim.better} {'is better' if claim.gain > 0 else 'is worse'} than {claim.than} in {claim.comparison} "
        f'({claim.metric.replace("_", " ")} {claim.measured.interval.text}): "{claim.says}" ({claim.source}) '
        f"{'holds here' if claim.gain > 0 else 'is contradicted here'}."
        for claim in separated
        if claim.measured is not None
    ]
    return text


def _separated(found: Sequence[Difference], baseline: str) -> str:
    better = [item for item in found if item.is_separated and item.interval.estimate > 0]
    worse = [item for item in found if item.is_separated and item.interval.estimate < 0]

    def listed(items: Sequence[Difference]) -> str:
        return ", ".join(f"{item.method} ({item.comparison})" for item in items) or "none"

    return (
        f"Separated after Holm's correction for all lines: above {baseline} {listed(better)}; below {listed(worse)}. "
        "Intervals over seeds say what another training would reach; those over samples, of outcomes averaged over the "
        "seeds, what another test split would. Detectable: by as many seeds, with 80 % probability."
    )
