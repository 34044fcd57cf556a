"""Measure baselines on the drawings of `clipzoo hands`, and print the tables of docs/benchmarks/hands.md.

python scripts/hands_tables.py                            the data, the splits and the baselines
python scripts/hands_tables.py runs/hands/clip            with rows of finished runs
python scripts/hands_tables.py --montage hands.png        and a page of pictures: things by hands

Intervals are 95 % bootstrap intervals over things: all drawings of a thing are drawn together.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image

from clipzoo.cli.arguments import Parser, run_main
from clipzoo.io import below, read_yaml
from clipzoo.lab.worlds.hands import Drawing, normalised, read_drawings, split_drawings
from clipzoo.lab.worlds.packages import SOURCES, packages
from clipzoo.report.statistics import over_samples

TESTS = ("hands", "things", "both")
SHOWN = ("house", "cat", "rocket", "umbrella", "banana", "key", "anchor", "snail")
BINS, SIDE = 4, 16
BLOCK = 256


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="*", type=Path, help="finished runs of experiment=hands/...")
    parser.add_argument("--root", type=Path, default=Path("data/hands"), help="folder of `clipzoo hands`")
    parser.add_argument("--montage", type=Path, help="write a page of pictures to this PNG")
    options = parser.parse_args()
    facts = read_yaml(SOURCES)
    drawings = read_drawings(options.root / "pictures", facts["hands"])
    splits = split_drawings(drawings, facts["held_out"]["hands"], facts["held_out"]["things"])
    _print(data_rows(drawings, facts))
    _print(split_rows(splits, facts))
    if options.montage:
        montage(drawings, list(facts["hands"]), options.root, options.montage)
    _print([["method", *(f"names, {name}" for name in TESTS)], *baseline_rows(splits, options.root)])
    if options.runs:
        _print([["run", *(f"names, {name}" for name in TESTS)], *map(run_row, options.runs)])


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
    right = [drawing.group == guess for drawing, guess in zip(part, guesses, strict=True)]
    return interval(np.array(right), np.array([drawing.group for drawing in part]))


def interval(right: np.ndarray, things: np.ndarray) -> str:
    value = over_samples(100 * right.astype(float), things)
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


def run_row(run: Path) -> list[str]:
    """Top-1 accuracies of a finished run, from the predictions of its evaluation."""
    cells = []
    for name in TESTS:
        (path,) = run.rglob(f"zero_shot/names_{name}.npz")
        with np.load(path) as arrays:
            labels, predictions = arrays["all_labels"], arrays["all_predictions"]
        cells.append(interval(labels == predictions, labels))
    return [f"`{re.sub('^.*runs/', '', str(run))}`", *cells]


def montage(drawings: Sequence[Drawing], hands: Sequence[str], root: Path, path: Path) -> None:
    """Write a page of pictures: a row for each hand, a column for each thing of SHOWN."""
    first = {(one.hand, one.group): one for one in reversed(drawings)}
    blank = Image.new("RGB", (2, 2), "white")
    keys = [(hand, thing) for hand in hands for thing in SHOWN]
    tiles = [(_picture(root, first[key]) if key in first else blank, " ".join(key)) for key in keys]
    figure = Figure(figsize=(2 * len(SHOWN), 2.4 * len(hands)), layout="constrained")
    for axes, (picture, title) in zip(figure.subplots(len(hands), len(SHOWN), squeeze=False).flat, tiles, strict=True):
        axes.axis("off")
        axes.imshow(picture)
        axes.set_title(title, fontsize=6)
    figure.savefig(path, dpi=60)
    with Image.open(path) as page:
        page.convert("RGB").quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    run_main(main)
