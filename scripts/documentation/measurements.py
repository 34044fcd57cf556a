"""Plots of the measurements that are stored in docs/benchmarks/readings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .drawing import BLUE, GREEN, IMAGES, INK, ORANGE, VIOLET, figure, save

HEADS = {"clip": "CLIP", "kme": "KME-CLIP", "wpse": "WPSE"}
METRICS = ("name\ntop-1", "name\ntop-5", "image\nto text @1", "text\nto image @1")
FOLDER = IMAGES.parent / "benchmarks" / "readings"
CASES = {
    "kme-128": "KME, N = 128", "kme-256": "KME, N = 256", "kme-captions": "KME, 12 words of 77",
    "kme-full": "KME, 197 x 77 points", "waves-64": "WPSE's features",
}  # fmt: skip


def read(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def draw() -> None:
    """Write docs/images/benchmarks/*.svg, and the learning curves of make emoji."""
    speeds = read("training")["medians"]["samples_per_cpu_second"]
    speeds = {"open_clip 3.3.0" if name == "open_clip" else name: speed for name, speed in speeds.items()}
    bars("training", speeds, "training, samples per CPU second", form="{:.1f}")

    cases = read("loader")["cases"]
    sizes = [f"{case['image']} to {case['image_size']}" for case in cases]
    ratios = {
        side: [case["work_ratio"][key] for case in cases]
        for side, key in (("Pillow", "exact, PIL"), ("simplejpeg", "exact"))
    }
    grouped("loader", sizes, ratios, "loader, samples per CPU second over open_clip's (dotted)", reference=1.0)

    factors = {result["case"]: result["times_ours"] for result in read("ops")["results"]}
    measured = [case for case in CASES if case in factors]
    sides = {"naive": "naive", "torch.compile": "compiled"}
    times = {side: [factors[case][key] for case in measured] for side, key in sides.items()}
    grouped("scores", [CASES[case] for case in measured], times, "CPU seconds over ours (dotted)", reference=1.0)

    drawn, (panel,) = figure(6.4, 2.5)
    for side, colour in (("clipzoo", BLUE), ("scikit-learn", ORANGE), ("torch L-BFGS", VIOLET)):
        points = sorted((value["C"], value[side]["seconds"]) for value in read("probe")["values"] if side in value)
        panel.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3, label=side)
    panel.set(xscale="log", yscale="log", xlabel="C", ylabel="seconds per fit")
    panel.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    save(drawn, "benchmarks/probe")

    seen_once = "seen exactly once"
    cases = {name: both for name, both in read("epochs").items() if seen_once in both.get("open_clip", {})}
    labels = [name.replace(" of 500, 2 workers", "") for name in cases]
    shares = {side: [100 * both[side][seen_once] for both in cases.values()] for side in ("open_clip", "clipzoo")}
    grouped("epochs", labels, shares, "samples seen exactly once in an epoch, %")

    options = read("options")["options"]
    costs = {name: [option[name] for option in options.values()] for name in ("time", "memory")}
    grouped("options", list(options), costs, "with the option over without it (dotted: equal)", reference=1.0)

    runs = read("emoji_curves")
    drawn, (left, right) = figure(7.6, 2.6, panels=2)
    metrics = list(next(iter(runs["results"].values())))
    for number, (head, colour) in enumerate(zip(HEADS, (BLUE, ORANGE, GREEN), strict=True)):
        curve = runs["curves"][head]
        left.plot(curve["step"], curve["loss"], color=colour, marker="o", markersize=2.5, label=HEADS[head])
        places = [place + 0.26 * (number - 1) for place in range(len(metrics))]
        right.bar(places, [runs["results"][head][metric] for metric in metrics], width=0.24, color=colour)
    left.set(xlabel="step", ylabel="loss on Google's emoji", ylim=0)
    left.legend(frameon=False, fontsize=8)
    right.set(ylabel="% on Twitter's emoji", xticks=range(len(metrics)), xticklabels=METRICS)
    right.tick_params(axis="x", length=0, labelsize=8)
    save(drawn, "learning_curve")


def bars(
    name: str, values: Mapping[str, float], label: str, reference: float | None = None, form: str = "{:.2f}"
) -> None:
    """Write horizontal bars; `reference` is a line, such as the peer's value."""
    drawn, (panel,) = figure(6.4, 0.55 + 0.34 * len(values))
    places = range(len(values))[::-1]
    colours = [ORANGE if key.startswith(("open_clip", "scikit-learn", "naive")) else BLUE for key in values]
    panel.barh(places, list(values.values()), color=colours, height=0.66)
    for place, value in zip(places, values.values(), strict=True):
        panel.text(value, place, " " + form.format(value), va="center", fontsize=8.5)
    if reference is not None:
        panel.axvline(reference, color=INK, linewidth=0.9, linestyle=":")
    panel.set(yticks=list(places), yticklabels=list(values), xlabel=label)
    panel.margins(x=0.12)
    panel.tick_params(axis="y", length=0)
    save(drawn, f"benchmarks/{name}")


def grouped(
    name: str, labels: Sequence[str], sides: Mapping[str, Sequence[float]], label: str, reference: float | None = None
) -> None:
    """Write groups of horizontal bars, one bar per side."""
    drawn, (panel,) = figure(6.4, 0.8 + 0.42 * len(labels))
    height = 0.8 / len(sides)
    for number, (side, values) in enumerate(sides.items()):
        places = [len(labels) - 1 - place + 0.4 - height * (number + 0.5) for place in range(len(labels))]
        panel.barh(places, values, height=height * 0.92, color=(ORANGE, VIOLET, BLUE, GREEN)[number], label=side)
        for place, value in zip(places, values, strict=True):
            panel.text(value, place, f" {value:.3g}", va="center", fontsize=8)
    if reference is not None:
        panel.axvline(reference, color=INK, linewidth=0.9, linestyle=":")
    panel.set(yticks=range(len(labels))[::-1], yticklabels=labels, xlabel=label)
    panel.tick_params(axis="y", length=0)
    panel.margins(x=0.1)
    panel.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(sides))
    save(drawn, f"benchmarks/{name}")
