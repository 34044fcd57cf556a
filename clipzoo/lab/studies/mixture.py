"""KME-CLIP, section 4.2: a mixture world whose pointwise mutual information CLIP's similarity cannot represent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product

import torch
from torch import Tensor

from clipzoo.heads.base import Head
from clipzoo.heads.kme import KmeHead
from clipzoo.heads.vector import ClipHead
from clipzoo.lab.methods.judge import pair_weights
from clipzoo.lab.studies.figures import BLACK, BLUE, CYCLE, VERMILION, Drawing, line, panels, ticks_at
from clipzoo.lab.studies.framework import AdamStudy, Check, Claim, Findings, Row, all_scores, fit, pmi_agreement, select
from clipzoo.lab.studies.rank import lookup
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.types import Count, Features, NonNegative, Positive, Scale

CLIP, KME = "CLIP", "KME-CLIP"
COLOURS = {CLIP: VERMILION, KME: BLUE}
ERRORS = {"gap": ("loss above its least value, nats", None), "error_of_exp": ("largest error of exp PMI", None),
          "error": ("largest error of finite PMI", None)}  # fmt: skip
AGREEMENT = {"rank_correlation": ("rank correlation", 1.0), "slope": ("slope of the PMI on the score", 1.0),
             "mean_error": ("error, nats", 0.0)}  # fmt: skip
"""By column of the table: the label of its axis, and the value of the PMI itself."""


@dataclass(frozen=True)
class World:
    """r classes; item (i, j), i <= j, belongs half to class i and half to class j. Items are equally likely.

    There are m = r (r + 1) / 2 items. PMI(x, y) = log r sum_t p(t|x) p(t|y), -inf for disjoint items.
    """

    classes: int

    @cached_property
    def pmi(self) -> Tensor:
        first, second = torch.triu_indices(self.classes, self.classes)
        identity = torch.eye(self.classes, dtype=torch.float64)
        share = (identity[first] + identity[second]) / 2  # p(class | item), [m, r]
        return (self.classes * share @ share.mT).log()

    @property
    def joint(self) -> Tensor:
        """p(x, y), [m, m]."""
        return self.pmi.exp() / len(self.pmi) ** 2

    @property
    def information(self) -> float:
        return float((self.joint * self.pmi.nan_to_num(neginf=0.0)).sum())

    def draw(self, samples: int, seed: int) -> tuple[Tensor, Tensor]:
        """Draw item numbers x and y, both [n]."""
        generator = torch.Generator().manual_seed(seed)
        cell = torch.multinomial(self.joint.flatten(), samples, replacement=True, generator=generator)
        return cell // len(self.pmi), cell % len(self.pmi)


@dataclass(frozen=True)
class Mixture(AdamStudy):
    """Train CLIP and KME-CLIP heads on the mixture world and compare their scores with the PMI.

    classes: values of r. widths: embedding widths d. item_width: width of an item's free token vector. samples:
    training pairs. temperature, max_scale, gamma: settings of the heads.
    built_error: error of theorem 7's construction in exp PMI for d = 2. information_tolerance: allowed distance in nats
    of KME-CLIP's loss at the largest width from its minimum -I.
    """

    classes: list[Count]
    widths: list[Count]
    item_width: Count
    samples: Count
    temperature: Scale
    max_scale: Positive
    gamma: Scale
    built_error: NonNegative
    information_tolerance: NonNegative

    title = "The mixture world"
    source = "KME-CLIP, section 4.2, assumption 5, theorems 6 and 7"
    question = (
        "There are r classes, an item of each pure class and one of each half-and-half mixture. Which similarity can "
        "hold the pointwise mutual information (PMI), and in how many dimensions? Both heads are trained by InfoNCE on "
        "free vectors for the items, two points an item for KME-CLIP; the population's loss is then computed exactly."
    )
    differs = (
        "The paper proves both theorems and measures neither. Theorem 6 also assumes a low modality gap, which is not "
        "imposed on the training here, so CLIP has more freedom than the theorem gives it.",
        "Items are equally likely. Besides the loss there are two errors: the largest of |S - PMI| over pairs whose "
        "PMI is finite, after the best constant is taken off, and the largest of |exp S - exp PMI| over all pairs, "
        "both of mean 1.",
        "The agreement of the score with the PMI is not in the paper: half of the weight is on matched pairs and half "
        "on independent ones. Pairs that never occur have PMI -inf: they count for the rank correlation alone.",
    )

    def run(self) -> Findings:
        rows: list[Row] = []
        for classes, width, kind in product(self.classes, self.widths, COLOURS):
            world, wide = World(classes), self.item_width
            head: Callable[[], Head] = partial(KmeHead, wide, wide, width, self.gamma, None, "all")
            if kind == CLIP:
                head = partial(ClipHead, wide, wide, width, self.temperature, self.max_scale, True)
            model = fit(
                partial(lookup, len(world.pmi), 2 if kind == KME else 1, wide), head,
                InfoNCE(image_to_text=0.5, text_to_image=0.5), *world.draw(self.samples, self.seed), steps=self.steps,
                batch=self.batch, rate=self.rate, seed=self.seed,
            )  # fmt: skip
            scores = all_scores(model, len(world.pmi))
            loss, (error, error_of_exp) = population_loss(scores, world), largest_errors(scores, world.pmi)
            rows.append({
                "head": kind, "classes": classes, "width": width, "error": error, "error_of_exp": error_of_exp,
                **agreement_with_pmi(scores, world),
                "loss": loss, "information": world.information, "gap": loss + world.information,
            })  # fmt: skip
        built = [self._built(classes) for classes in self.classes]
        most, narrow, widest = max(self.classes), min(self.widths), max(self.widths)
        checks = [
            Check(f"theorem 7's points, r = {r}, d = 2: largest error of exp PMI", error, 0.0, self.built_error)
            for r, error in zip(self.classes, built, strict=True)
        ]
        for row in select(rows, head=KME, width=widest):
            name = f"loss of trained KME-CLIP, r = {row['classes']}, d = {widest}: -I"
            checks.append(Check(name, row["loss"], -row["information"], self.information_tolerance))
        worlds = [World(classes) for classes in self.classes]
        exact = [agreement_with_pmi(world.pmi.nan_to_num(neginf=-40.0), world) for world in worlds]
        checks.append(Check("error of the PMI itself as a score", max(e["mean_error"] for e in exact), 0.0, 1e-9))
        claims = list(self._claims(rows, built))
        gaps = {(row["head"], row["width"]): row["gap"] for row in select(rows, classes=most)}
        verdict = (
            f"With r = {most} classes and d = {widest}, CLIP's loss stays {gaps[CLIP, widest]:.3f} nats "
            f"above its least value and KME-CLIP's {gaps[KME, widest]:.3f}; theorem 7's points hold exp PMI to "
            f"{max(built):.1g} in two dimensions, while trained ones with d = {narrow} stay "
            f"{gaps[KME, narrow]:.1f} nats above; {Claim.count(claims)}."
        )
        errors = "Trained heads in the mixture world of r classes: CLIP (dashed) and KME-CLIP."
        agreement = "Agreement of the trained scores with the PMI; dotted: the PMI itself."
        drawings = {"errors": self._draw(rows, ERRORS, errors), "agreement": self._draw(rows, AGREEMENT, agreement)}
        return Findings(verdict, checks, claims, {"errors": rows}, drawings)

    def _built(self, classes: int) -> float:
        """Error of theorem 7's points in two dimensions: v_t on a circle, two points of weight sqrt(r) / 2 per item."""
        angles = 2 * math.pi * torch.arange(classes, dtype=torch.float64) / classes
        circle = torch.stack([angles.cos(), angles.sin()], dim=1)
        first, second = torch.triu_indices(classes, classes)
        weight = torch.full((len(first), 2, 1), math.log(math.expm1(math.sqrt(classes) / 2)), dtype=torch.float64)
        tokens = torch.cat([torch.stack([circle[first], circle[second]], dim=1), weight], dim=2)
        # The error is r times the kernel between neighbours; half the allowed error leaves room for the other points.
        gamma = math.log(2 * classes / self.built_error) / (2 * (1 - math.cos(2 * math.pi / classes)))
        head = KmeHead(3, 3, 2, gamma, None, "all").double()
        with torch.no_grad():
            for side in (head.image, head.text):
                side.projection.copy_(torch.eye(3, 2))
                side.weight_projection.copy_(torch.tensor([[0.0], [0.0], [1.0]]))
            features = Features(tokens[:, 0], tokens)
            scores = head.score(head.embed_image(features), head.embed_text(features))
        return float((scores.exp() - World(classes).pmi.exp()).abs().max())

    def _claims(self, rows: list[Row], built: list[float]) -> Iterator[Claim]:
        few, many, narrow, wide = min(self.classes), max(self.classes), min(self.widths), max(self.widths)
        clip, kme = ({(row["classes"], row["width"]): row for row in select(rows, head=kind)} for kind in (CLIP, KME))
        nearer = {
            measure: sum(row[key] < clip[setting][key] for setting, row in kme.items())
            for measure, key in (("loss", "gap"), ("exp PMI", "error_of_exp"), ("finite PMI", "error"))
        }
        agreements = {CLIP: clip[many, wide], KME: kme[many, wide]}
        yield Claim(
            "CLIP's similarity has difficulty in expressing the PMI when r is large; it needs more dimensions with "
            "more classes (theorem 6).",
            f"loss above the least at d = {narrow}: {clip[few, narrow]['gap']:.3f} for r = {few}, "
            f"{clip[many, narrow]['gap']:.3f} for r = {many}; at d = {wide} and r = {many}: "
            f"{clip[many, wide]['gap']:.3f}",
            clip[many, narrow]["gap"] > max(clip[few, narrow]["gap"], clip[many, wide]["gap"]),
        )
        yield Claim(
            "KME-CLIP holds it with two points an item in two dimensions for any number of classes (theorem 7).",
            "largest error of exp PMI of the theorem's points: "
            + ", ".join(f"{error:.1g} for r = {r}" for r, error in zip(self.classes, built, strict=True)),
            max(built) <= self.built_error,
        )
        yield Claim(
            f"(Not in the paper.) Training finds such points with d = {narrow}.",
            f"trained at d = {narrow}: {kme[many, narrow]['gap']:.3f} above the least for r = {many}",
            kme[many, narrow]["gap"] < 0.1,
        )
        yield Claim(
            "(Not in the paper.) Trained KME-CLIP is nearer to the PMI than CLIP for every r and d, by loss and by "
            "its largest errors.",
            "nearer by "
            + ", by ".join(f"{measure} in {count}" for measure, count in nearer.items())
            + f" of {len(kme)} pairs of r and d",
            all(count == len(kme) for count in nearer.values()),
        )
        # With one training each: no interval, and no statement about other seeds.
        yield Claim(
            f"(Not in the paper.) KME-CLIP's score follows the PMI more closely than CLIP's: higher rank "
            f"correlation and lower error for r = {many}, d = {wide}, in one training each.",
            "; ".join(
                f"{name} rank correlation {row['rank_correlation']:.3f}, slope {row['slope']:.2f}, error "
                f"{row['mean_error']:.2f} nats"
                for name, row in agreements.items()
            ),
            agreements[KME]["rank_correlation"] > agreements[CLIP]["rank_correlation"]
            and agreements[KME]["mean_error"] < agreements[CLIP]["mean_error"],
        )

    def _draw(self, rows: list[Row], measures: Mapping[str, tuple[str, float | None]], caption: str) -> Drawing:
        """Draw measures over the embedding width, on logarithmic axes where the PMI itself has no value."""
        figure, axes = panels(1, 3, 3.6, 3.2)
        for axis, (key, (title, exact)) in zip(axes, measures.items(), strict=True):
            for index, classes in enumerate(self.classes):
                for kind in COLOURS:
                    head_rows = select(rows, head=kind, classes=classes)
                    line(axis.plot, head_rows, "width", key, "o-" if kind == KME else "s--", color=CYCLE[index],
                         linewidth=1, markersize=4, label=f"{kind}, r = {classes}")  # fmt: skip
            scale = "log" if exact is None else "linear"
            axis.set(xlabel="embedding width d", ylabel=title, xscale="log", yscale=scale)
            ticks_at(axis, self.widths)
            if exact is not None:
                axis.axhline(exact, color=BLACK, linewidth=0.8, linestyle=":")
        axes[2].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return figure, caption


def agreement_with_pmi(scores: Tensor, here: World) -> dict[str, float]:
    return pmi_agreement(scores.numpy(), here.pmi.numpy(), pair_weights(here.joint.numpy()))


def population_loss(scores: Tensor, here: World) -> float:
    """Limit of InfoNCE minus log N for large batches: -E S + half the log-mean-exps of both directions. Minimum: -I."""
    uniform = math.log(len(scores))
    rows, columns = scores.logsumexp(dim=1) - uniform, scores.logsumexp(dim=0) - uniform
    return float((rows.mean() + columns.mean()) / 2 - (here.joint * scores).sum())


def largest_errors(scores: Tensor, pmi: Tensor) -> tuple[float, float]:
    """max |S - PMI - c| over finite PMI with the best constant c, which is half the range, and max |exp S - exp PMI|.

    exp S is scaled to mean 1, the mean of exp PMI (as in the proof of theorem 7).
    """
    difference = (scores - pmi)[pmi.isfinite()]
    ratio = torch.softmax(scores.flatten(), dim=0) * scores.numel()
    return float(difference.max() - difference.min()) / 2, float((ratio - pmi.exp().flatten()).abs().max())
