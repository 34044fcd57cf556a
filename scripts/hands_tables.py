"""Measure baselines on the drawings of `clipzoo hands`, and print the tables of docs/benchmarks/hands.md.

python scripts/hands_tables.py                            the data, the splits and the baselines
python scripts/hands_tables.py runs/hands/*               with rows of finished runs; runs NAME_seedN of equal length
                                                          share one
python scripts/hands_tables.py runs/* --claims claims.png  and the differences of the lab's claims over steps
python scripts/hands_tables.py --montage hands.png        and a page of pictures: things by hands

Intervals are 95 % bootstrap intervals over things: all drawings of a thing are drawn together.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from clipzoo.cli.arguments import Parser, run_main
from clipzoo.errors import ConfigError
from clipzoo.io import below, read_yaml
from clipzoo.io.text import save_figure
from clipzoo.lab.methods.lab import read_settings
from clipzoo.lab.methods.page import Verdict, claims_figure
from clipzoo.lab.worlds import hands
from clipzoo.lab.worlds.hands import Drawing, normalised, read_drawings, split_drawings
from clipzoo.lab.worlds.packages import SOURCES, packages
from clipzoo.report.statistics import adjusted, over_samples, over_seeds, seeds_difference
from clipzoo.runs.record import RunRecord

TESTS = ("hands", "things", "both")
METHODS = {"CLIP": "clip", "KME-CLIP": "kme", "WPSE Gaussian": "wpse", "WPSE linear": "wpse_linear",
           "WPSE positive weights": "wpse_positive", "WPSE positive weights from 1": "wpse_positive_1",
           "CLOOB": "cloob", "CLOOB, Hopfield from step 50": "cloob_start_200", "InfoLOOB": "infoloob",
           "SogCLR": "sogclr", "iSogCLR": "isogclr", "NUCLR": "nuclr", "SigLIP": "siglip"}  # fmt: skip
"""Runs of scripts/hands_methods.py by the lab's name of the method."""
SHOWN = ("house", "cat", "rocket", "umbrella", "banana", "key", "anchor", "snail")
BINS, SIDE = 4, 16
BLOCK = 256


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="*", type=Path, help="finished runs of experiment=hands/...")
    parser.add_argument("--root", type=Path, default=Path("data/hands"), help="folder of `clipzoo hands`")
    parser.add_argument("--claims", type=Path, help="write the differences of the lab's claims over steps to this PNG")
    parser.add_argument("--montage", type=Path, help="write a page of pictures to this PNG")
    options = parser.parse_args()
    facts = read_yaml(SOURCES)
    drawings = read_drawings(options.root / "pictures", facts["hands"])
    if not drawings:
        raise ConfigError(f"{options.root} has no drawings: make them with `clipzoo hands`, or give --root")
    splits = split_drawings(drawings, facts["held_out"]["hands"], facts["held_out"]["things"])
    _print(data_rows(drawings, facts))
    _print(split_rows(splits, facts))
    if options.montage:
        montage(drawings, facts, options.root, options.montage)
    _print([["method", *(f"names, {name}" for name in TESTS)], *baseline_rows(splits, options.root)])
    if options.runs:
        titles = ["runs", "steps", "seeds", *(f"names, {name}" for name in TESTS), "mean minus CLIP's", "revision"]
        _print([titles, *run_rows(options.runs)])
        if verdicts := judged(options.runs):
            _print(claim_rows(verdicts))
    if options.claims:
        if not options.runs or not verdicts:
            raise ConfigError("--claims: give the runs of two methods of a claim, with two seeds each")
        save_figure(claims_figure(verdicts), options.claims)


def _print(rows: Sequence[Sequence[str]]) -> None:
    lines = [rows[0], ["---", *["---:"] * (len(rows[0]) - 1)], *rows[1:]]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines), end="\n\n")


def data_rows(drawings: Sequence[Drawing], facts: Mapping[str, Mapping]) -> list[list[str]]:
    hands_of = defaultdict[str, set[str]](set)
    for drawing in drawings:
        hands_of[drawing.group].add(drawing.hand)

    def counts(part: Sequence[Drawing]) -> list[str]:
        things = {one.group for one in part}
        numbers = [len(part), len(things), sum(len(hands_of[thing]) > 1 for thing in things)]
        numbers += [sum(bool(one.keywords) for one in part), sum(bool(one.names) for one in part)]
        return [f"{number:,}" for number in numbers]

    titles = "hand, package, pictures, things, drawn by others too, with keywords, in other languages, licence, author"
    rows = [titles.split(", ")]
    for hand, entry in facts["hands"].items():
        package = packages()[entry["package"]]
        own = counts([one for one in drawings if one.hand == hand])
        rows.append([f"`{hand}`", f"{package.name} {package.version}", *own, package.licence, package.author])
    return [*rows, ["all", "", *counts(drawings), "", ""]]


def split_rows(splits: Mapping[str, Sequence[Drawing]], facts: Mapping[str, Mapping]) -> list[list[str]]:
    rows = [["split", "pictures", "things", "SHA-256 of its words"]]
    for name, part in splits.items():
        things = len({drawing.group for drawing in part})
        rows.append([f"`{name}`", f"{len(part):,}", f"{things:,}", f"`{facts['splits'][name][:16]}`"])
    return rows


def baseline_rows(splits: Mapping[str, Sequence[Drawing]], root: Path) -> Iterator[list[str]]:
    """Yield a row of top-1 accuracies for each baseline: classes are the names of a split."""
    train = splits["train"]
    classes = {name: Names({drawing.group for drawing in splits[name]}) for name in TESTS}
    yield ["chance", *(f"{100 / len(classes[name].names):.2f}" for name in TESTS)]
    cells = []
    for name in TESTS:
        words = [[word for key in one.keywords for word in normalised(key).split()] for one in splits[name]]
        cells.append(accuracy(splits[name], [classes[name].best(texts) for texts in words]))
    yield ["its own keywords, by string match (sees no picture)", *cells]
    methods = {"nearest training picture, colour histogram": histogram, "the same, 16 x 16 grey pixels": grey}
    for title, features in methods.items():
        known, cells = torch.stack([features(root, drawing) for drawing in train]), []
        for name in TESTS:
            test = torch.stack([features(root, drawing) for drawing in splits[name]])
            nearest = torch.cat([torch.cdist(part, known, p=1).argmin(1) for part in test.split(BLOCK)])
            groups = [train[place].group for place in nearest.tolist()]
            # A name that is not a class is replaced by the class with which it shares the most words.
            own = classes[name]
            guesses = [group if group in own.names else own.best(group.split()) for group in groups]
            cells.append(accuracy(splits[name], guesses))
        yield [title, *cells]


class Names:
    """Class names that are compared with words."""

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self._with = defaultdict[str, list[str]](list)
        for name in sorted(names):
            for word in set(name.split()):
                self._with[word].append(name)

    def best(self, words: Collection[str]) -> str:
        """Return the name with the largest share of common words; "" for none. The first of equal ones wins."""
        scores = Counter[str]()
        for word in set(words):
            scores.update(self._with[word])
        union = {name: len(set(words) | set(name.split())) for name in scores}
        shares = {name: count / union[name] for name, count in scores.items()}
        return max(sorted(shares), key=shares.__getitem__, default="")


def accuracy(part: Sequence[Drawing], guesses: Sequence[str]) -> str:
    right = [100.0 * (drawing.group == guess) for drawing, guess in zip(part, guesses, strict=True)]
    return interval(np.array(right), np.array([drawing.group for drawing in part]))


def interval(percent: np.ndarray, things: np.ndarray) -> str:
    value = over_samples(percent, things)
    return f"{value.estimate:.2f} ({value.low:.2f} to {value.high:.2f})"


def histogram(root: Path, drawing: Drawing) -> torch.Tensor:
    """[BINS^3] shares of colours."""
    pixels = np.asarray(_picture(root, drawing)).reshape(-1, 3).astype(int) * BINS // 256
    cells = np.bincount(pixels @ [BINS * BINS, BINS, 1], minlength=BINS**3)
    return torch.from_numpy(cells / len(pixels)).float()


def grey(root: Path, drawing: Drawing) -> torch.Tensor:
    """[SIDE^2] grey values."""
    return (
        torch.from_numpy(np.asarray(_picture(root, drawing).convert("L").resize((SIDE, SIDE))) / 255).float().flatten()
    )


def _picture(root: Path, drawing: Drawing) -> Image.Image:
    with Image.open(below(root / "pictures", f"{drawing.uid}.png")) as picture:
        return picture.convert("RGB")


def by_name(folders: Sequence[Path]) -> dict[tuple[str, int], list[Path]]:
    """Return runs NAME_seedN by NAME and steps, in this order."""
    runs = defaultdict[tuple[str, int], list[Path]](list)
    for folder in folders:
        runs[re.sub(r"_seed\d+$", "", folder.name), int(RunRecord.read(folder).training.get("steps", 0))].append(folder)
    return {key: runs[key] for key in sorted(runs)}


def outcomes(seeds: Sequence[Path], test: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the labels [n] of a test, and 100 for each right answer and 0 for others, [n] for each run."""
    arrays = [np.load(next(folder.rglob(f"zero_shot/names_{test}.npz"))) for folder in seeds]
    return arrays[0]["all_labels"], [100.0 * (one["all_labels"] == one["all_predictions"]) for one in arrays]


def mean_accuracy(folder: Path) -> float:
    """Return the mean of a run's three top-1 accuracies, in percent."""
    return float(np.mean([outcomes([folder], test)[1][0].mean() for test in TESTS]))


def run_rows(folders: Sequence[Path]) -> Iterator[list[str]]:
    """Yield a row for the runs NAME_seedN of each name: mean top-1 accuracies, with intervals over things (of answers
    averaged over the seeds) and, of several runs, Student's t intervals over seeds; Welch's interval of the mean's
    difference from runs clip_seedN of equal length."""
    runs = by_name(folders)
    for (name, steps), seeds in runs.items():
        records, cells = [RunRecord.read(folder) for folder in seeds], []
        for test in TESTS:
            labels, right = outcomes(seeds, test)
            cell = interval(np.mean(right, axis=0), labels)
            if len(seeds) > 1:
                value = over_seeds([float(values.mean()) for values in right])
                cell += f"; seeds {value.low:.2f} to {value.high:.2f}"
            cells.append(cell)
        clip, difference = runs.get(("clip", steps), []), ""
        if name != "clip" and min(len(seeds), len(clip)) > 1:
            before, after = ([mean_accuracy(folder) for folder in side] for side in (clip, seeds))
            difference = seeds_difference("accuracy", "hands", name, before, after).interval.text("+.2f")
        revisions = ", ".join(sorted({str(record.revision)[:8] for record in records}))
        yield [f"`{name}`", f"{steps:,}", str(len(seeds)), *cells, difference, revisions]


def judged(folders: Sequence[Path]) -> list[Verdict]:
    """Return verdicts on the lab's claims about accuracy at each length of these runs, in the order of the claims."""
    runs, pairs, verdicts = by_name(folders), set[tuple[str, str]](), list[Verdict]()
    for claim in read_settings("default").claims:
        pair = claim["than"], claim["better"]
        # The lab has several claims about some pairs, on several worlds: here the first one is judged.
        if claim["metric"] != "accuracy" or pair in pairs:
            continue
        pairs.add(pair)
        here = {**claim, "comparison": "hands"}
        for steps in sorted({steps for _, steps in runs}):
            seeds = [runs.get((METHODS.get(method, ""), steps), []) for method in pair]
            if min(map(len, seeds)) > 1:
                before, after = ([mean_accuracy(folder) for folder in side] for side in seeds)
                verdicts.append(Verdict(here, steps, seeds_difference("accuracy", "hands", pair[1], before, after)))
    measured = adjusted([item.measured for item in verdicts if item.measured])
    return [replace(item, measured=difference) for item, difference in zip(verdicts, measured, strict=True)]


def claim_rows(verdicts: Sequence[Verdict]) -> list[list[str]]:
    """Return a row for each verdict; the words of a claim stand in its first one."""
    titles = "claim, source, compared, steps, seeds, difference and interval, p (Holm), here, what it takes"
    rows, last = [titles.split(", ")], None
    for item in verdicts:
        claim, value = item.claim, item.measured
        assert value
        words = [claim["says"], claim["source"], f"{claim['better']} - {claim['than']}"]
        numbers = f"{item.steps:,}", value.basis, value.interval.text("+.2f"), f"{value.p:.2g}"
        rows.append([*(words if claim is not last else [""] * 3), *numbers, item.verdict, item.power])
        last = claim
    return rows


def montage(drawings: Sequence[Drawing], facts: Mapping[str, Mapping], root: Path, path: Path) -> None:
    """Write a page of pictures: a row for each hand, a column for each thing of SHOWN."""
    first = {(one.hand, one.group): one for one in reversed(drawings)}
    tile, left, top = hands.SIZE + 12, 150, 40
    size = (left + tile * len(SHOWN), top + tile * len(facts["hands"]))
    page, font = Image.new("RGB", size, "white"), ImageFont.load_default(17)
    write = ImageDraw.Draw(page)
    for column, thing in enumerate(SHOWN):
        write.text((left + tile * (column + 0.5), top / 2), thing, "black", font, "mm")
    for row, hand in enumerate(facts["hands"]):
        y = top + tile * row
        held_out = "\n(held out)" if hand in facts["held_out"]["hands"] else ""
        write.text((8, y + tile / 2), hand.replace("_", " ") + held_out, "black", font, "lm")
        write.line((0, y, size[0], y), "lightgrey")
        for column, thing in enumerate(SHOWN):
            if (hand, thing) in first:
                page.paste(_picture(root, first[hand, thing]), (left + tile * column + 6, y + 6))
    page.quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    run_main(main)
