"""Compare heads and objectives with the numbers of tests/golden, and write the table of docs/benchmarks/golden.md.

python scripts/golden_table.py             write the table
python scripts/golden_table.py --check     write nothing; exit with 1 if an array is missed

tests/golden/README.md describes every array. Each function below passes the inputs of a file to the public classes and
yields comparisons: names of arrays, our values, and the expected values in the same units.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from clipzoo.cli.arguments import Parser, run_main
from clipzoo.config.groups import CONF
from clipzoo.heads.cloob import CloobHead
from clipzoo.heads.kme import KmeHead
from clipzoo.heads.points import TokenPoints
from clipzoo.heads.vector import ClipHead, UnitVectorHead
from clipzoo.heads.wpse import GaussianKernel, InverseMultiquadricKernel, Kernel, WpseHead
from clipzoo.objectives.base import Objective
from clipzoo.objectives.infoloob import InfoLOOB
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.objectives.nuclr import NUCLR
from clipzoo.objectives.per_sample import UNSET
from clipzoo.objectives.sogclr import SogCLR
from clipzoo.report.render import markdown, text_table
from clipzoo.types import Batch, Features, Loss, Progress, Similarity

ROOT = CONF.parent
NUMBERS, PAGE = ROOT / "tests" / "golden", ROOT / "docs" / "benchmarks" / "golden.md"
BEGIN, END = "<!-- table of scripts/golden_table.py -->", "<!-- end of the table -->"
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Largest relative error of an array."""
TERM_TOLERANCES = {torch.float64: 1e-14, torch.float32: 1e-6}
"""Largest error relative to the terms of which a value is the difference."""
VIEWS = "image", "text"
PROGRESS = [Progress(step, total_steps=20, samples=40, global_batch=8) for step in (0, 4, 5, 9, 10, 14, 15)]
"""The six steps of NUCLR's and SogCLR's files, in epochs 0 0 1 1 2 2 of 4, and the first step of epoch 3."""

Numbers = Mapping[str, Tensor]


@dataclass(frozen=True)
class Comparison:
    """names: arrays of the file. terms: size of the terms of which the values are a difference, 0 if unknown."""

    names: tuple[str, ...]
    ours: Tensor
    expected: Tensor
    terms: float = 0.0

    @property
    def difference(self) -> float:
        assert self.ours.shape == self.expected.shape, (self.names, self.ours.shape, self.expected.shape)
        return (self.ours - self.expected).abs().max().item()

    @property
    def error(self) -> float:
        """Largest difference, relative to the largest expected value."""
        largest = self.expected.abs().max().item()
        return self.difference / largest if largest else math.inf if self.difference else 0.0

    @property
    def cancels(self) -> bool:
        """True if the relative error is above the tolerance, and the error relative to the terms is rounding."""
        dtype = self.ours.dtype
        return self.error > TOLERANCES[dtype] and self.difference <= self.terms * TERM_TOLERANCES[dtype]

    @property
    def agrees(self) -> bool:
        return self.error <= TOLERANCES[self.ours.dtype] or self.cancels


def named(numbers: Numbers, prefix: str, values: Mapping[str, Tensor], terms: float = 0.0) -> Iterator[Comparison]:
    for name, value in values.items():
        yield Comparison((prefix + name,), value.detach(), numbers[prefix + name], terms)


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    rows, missed = [], []
    for file in FILES:
        comparisons = {dtype: list(compare(file, dtype)) for dtype in TOLERANCES}
        missed += [c.names[0] for results in comparisons.values() for c in results if not c.agrees]
        errors = [max(c.error for c in results if not c.cancels) for results in comparisons.values()]
        whole = comparisons[torch.float64]
        arrays, values = len({name for c in whole for name in c.names}), sum(c.ours.numel() for c in whole)
        cancelling = sum(c.cancels for c in whole)
        rows.append([*FILES[file].row, str(arrays), f"{values:,}", *(f"{e:.0e}" for e in errors), str(cancelling)])
    columns = ["head, objective", "source", "arrays", "values", "float64", "float32", "differences of larger terms"]
    table = markdown(text_table(columns, rows, left=2))
    print(table)
    if missed:
        print(f"{len(missed)} arrays are missed: {', '.join(missed)}", file=sys.stderr)
    if not options.check:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}")
    return int(bool(missed))


def compare(file: str, dtype: torch.dtype) -> Iterator[Comparison]:
    """Yield the comparisons of a file, in float64 or float32."""
    yield from FILES[file].compare(read(file, dtype))


def read(file: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    with np.load(NUMBERS / f"{file}.npz") as arrays:
        tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    # These sums have more powers of ten than float32: their logarithms are compared.
    tensors |= {name: tensor.log() for name, tensor in tensors.items() if "_exact_u_" in name}
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


# One function for each file.


def clip(numbers: Numbers) -> Iterator[Comparison]:
    for group in "ab":
        raw = [numbers[f"{group}_{view}_raw"] for view in VIEWS]
        width = raw[0].shape[1]
        head = ClipHead(width, width, width, temperature=1.0, max_scale=100.0, learnable_temperature=True)
        with_identity(head, raw[0])
        for index, scale in enumerate(numbers[f"{group}_logit_scale"]):
            head.log_scale.data = scale.log()
            values: dict[str, Tensor] = {}
            for kind, views, similarity in raw_and_unit(head, raw):
                loss = loss_of(InfoNCE(0.5, 0.5), similarity)
                *gradients, log_scale = torch.autograd.grad(loss.total, [*views, head.log_scale])
                values |= {f"grad_{view}_{kind}": gradient for view, gradient in zip(VIEWS, gradients, strict=True)}
            values |= {"loss": loss.total, "logits_per_image": similarity.image_to_text.dense()}
            values |= {"loss_image": loss.logs["loss_image_to_text"], "loss_text": loss.logs["loss_text_to_image"]}
            yield from named(numbers, f"{group}{index}_", values | {"grad_logit_scale": log_scale / scale})


def cloob(numbers: Numbers) -> Iterator[Comparison]:
    for group in "ab":
        raw = [numbers[f"{group}_{view}_raw"] for view in VIEWS]
        unit = [normalize(rows, dim=1) for rows in raw]
        settings = zip(numbers[f"{group}_beta"], numbers[f"{group}_inv_tau"], strict=True)
        for index, (beta, inverse_tau) in enumerate(settings):
            case, tau = f"{group}{index}_", 1 / inverse_tau.item()

            def head_of(inverse_tau: float, hopfield: bool, like: Tensor = raw[0], beta: Tensor = beta) -> CloobHead:
                width = like.shape[1]
                return with_identity(CloobHead(width, width, width, inverse_tau, hopfield, beta.item()), like)

            image, text = unit
            queries = {"U_x": (image, image), "U_y": (text, image), "V_x": (image, text), "V_y": (text, text)}
            patterns = {name: head_of(1.0, True).retrieve(*pair) for name, pair in queries.items()}
            yield from named(numbers, case, patterns)
            for name in ("cloob", "halves", "infoloob", "hopfield_infonce"):
                hopfield, infonce = name != "infoloob", name == "hopfield_infonce"
                directions = (1.0, 0.0), (0.0, 1.0)
                halves = [InfoNCE(*pair) if infonce else InfoLOOB(tau, *pair) for pair in directions]
                values: dict[str, Tensor] = {}
                for kind, views, similarity in raw_and_unit(head_of(1 / tau, hopfield), raw):
                    first, second = (loss_of(half, similarity).total for half in halves)
                    gradients = torch.autograd.grad(first + second, views)
                    values |= {f"grad_{view}_{kind}": gradient for view, gradient in zip(VIEWS, gradients, strict=True)}
                yield from named(numbers, f"{case}{name}_", values)

                losses = {"loss": first + second} | ({} if name == "cloob" else {"loss_1": first, "loss_2": second})
                # Losses are differences of logits, those of InfoLOOB times tau.
                yield from named(numbers, f"{case}{name}_", losses, terms=1 / tau if infonce else 1.0)

                # The head's inverse temperature is a constant. As a factor of cosines it has a gradient.
                (factor,) = leaves(inverse_tau)
                cosines = head_of(1.0, hopfield).similarity(image, text)
                scaled = Similarity(cosines.image_to_text.scaled(factor.mul), cosines.text_to_image.scaled(factor.mul))
                objective = InfoNCE(1.0, 1.0) if infonce else InfoLOOB(1.0, 1.0, 1.0)
                total = loss_of(objective, scaled).total / (1.0 if infonce else factor)
                (gradient,) = torch.autograd.grad(total, [factor])
                yield from named(numbers, f"{case}{name}_", {"grad_inv_tau": gradient}, terms=1.0 if infonce else tau)


def wpse_similarity(numbers: Numbers) -> Iterator[Comparison]:
    points = [numbers[f"{view}_points"] for view in VIEWS]
    weights = [numbers[f"{view}_weights"] for view in VIEWS]
    width = points[0].shape[2]

    def head_of(alpha: tuple[float, float], kernel: Kernel, reduction: Literal["mean", "sum"]) -> WpseHead:
        head = WpseHead(
            width + 1, width + 1, width, alpha, kernel, features=32, evaluation_features=32, weights="signed",
            weight_bound=100.0, reduction=reduction, image_points=None, text_points="all", temperature=0.07,
            min_scale=1.0, max_scale=100.0, seed=0,
        ).to(points[0])  # fmt: skip
        last_entry_is_weight(head.image, head.text)
        head.scale.data = numbers["logit_scale"]
        return head

    def features(vectors: Tensor, weights: Tensor) -> Features:
        """Tokens whose last entry gives the weight: the head applies 100 tanh(. / 100) to it."""
        tokens = torch.cat([vectors, 100 * torch.atanh(weights / 100)], dim=2)
        return Features(tokens[:, 0], tokens)

    exact = {}
    for reduction in ("mean", "sum"):
        linear = head_of((1.0, 0.0), GaussianKernel(1.0), reduction)
        similarity = linear(*map(features, points, weights))
        exact[reduction] = (similarity.image_to_text.dense() / linear.scale).detach()
        yield from named(numbers, "linear_exact_", {reduction: exact[reduction]})
    image, text = (normalize(vectors, dim=2) for vectors in points)
    squared_distances = (image[:, None, :, None] - text[None, :, None]).square().sum(dim=-1)  # [b, b, M, L]
    products = weights[0][:, None] * weights[1][None].mT
    for kernel_name in ("gauss_0.5", "gauss_0.75", "imq_0.5", "imq_1.0"):
        kernel_class = GaussianKernel if kernel_name.startswith("gauss") else InverseMultiquadricKernel
        kernel = kernel_class(float(kernel_name.split("_")[1]))
        nonlinear = (products * kernel.value(squared_distances)).sum(dim=(2, 3))
        for mix, alpha in (("comb", (0.667, 0.333)), ("half", (0.5, 0.5)), ("nonlinear", (0.0, 1.0))):
            head = head_of(alpha, kernel, "mean")
            head.frequencies, head.phases = numbers[f"{kernel_name}_omega"], numbers[f"{kernel_name}_phase"][0]
            inputs = leaves(*points, *weights)
            embedded_image = head.embed_image(features(inputs[0], inputs[2]))
            embedded_text = head.embed_text(features(inputs[1], inputs[3]))
            similarity = head.similarity(embedded_image, embedded_text)
            scores = similarity.image_to_text.dense()
            loss = loss_of(InfoNCE(0.5, 0.5), similarity).total
            gradients = torch.autograd.grad(loss, [*inputs, head.scale])
            names = [f"grad_{view}_{part}" for part in ("points", "weights") for view in VIEWS] + ["grad_logit_scale"]
            values = dict(zip(names, gradients, strict=True))
            values |= {"sim": scores / head.scale, "loss": loss}
            values |= {"feature_image": embedded_image, "feature_text": embedded_text}
            right = scores.argmax(dim=1) == torch.arange(len(scores))
            values["acc"] = (100 * right.sum() / len(right)).to(scores)
            # The released code takes the mean over both sets of points, equation (6) the sum.
            values["exact_sum"] = alpha[0] * exact["sum"] + alpha[1] * nonlinear
            values["exact_mean"] = alpha[0] * exact["mean"] + alpha[1] * nonlinear / products[0, 0].numel()
            yield from named(numbers, f"{kernel_name}_{mix}_", values)


def kme(numbers: Numbers) -> Iterator[Comparison]:
    parts = [f"{view}_{part}_raw" for view in VIEWS for part in ("points", "weights")]
    inputs = [numbers[part] for part in parts]
    width = inputs[0].shape[2]
    head = KmeHead(width + 1, width + 1, width, gamma=1.0, image_points=None, text_points="all").to(inputs[0])
    last_entry_is_weight(head.image, head.text)

    def scored(gamma: Tensor, *parts: Tensor) -> Similarity:
        # gamma is the softplus of the parameter.
        head.raw_gamma.data = gamma + torch.log(-torch.expm1(-gamma))
        tokens = torch.cat(parts[:2], dim=2), torch.cat(parts[2:], dim=2)
        similarity: Similarity = head(*(Features(rows[:, 0], rows) for rows in tokens))
        return similarity

    for index, gamma in enumerate(numbers["gamma"]):
        views = leaves(*inputs)
        similarity = scored(gamma, *views)
        scores, loss = similarity.image_to_text.dense(), loss_of(InfoNCE(0.5, 0.5), similarity).total
        *gradients, raw_gamma = torch.autograd.grad(loss, [*views, head.raw_gamma])
        values = {f"grad_{part}": gradient for part, gradient in zip(parts, gradients, strict=True)}
        values |= {"grad_gamma": raw_gamma / head.raw_gamma.sigmoid(), "loss": loss}
        # The mean convention differs by a constant, the logarithm of the number of pairs of points.
        values |= {"sim_sum": scores, "sim_mean": scores - math.log(inputs[0].shape[1] * inputs[2].shape[1])}
        yield from named(numbers, f"g{index}_", values)

    # Proposition 2: one point of weight 1.
    weight = numbers["prop2_weight_raw"]
    similarity = scored(numbers["prop2_gamma"], inputs[0][:, :1], weight, inputs[2][:, :1], weight)
    scores, loss = similarity.image_to_text.dense(), loss_of(InfoNCE(0.5, 0.5), similarity).total
    cosine = 1 + numbers["prop2_tau"] * scores
    yield from named(numbers, "prop2_", {"sim": scores, "loss": loss, "cosine": cosine})


def nuclr(numbers: Numbers) -> Iterator[Comparison]:
    """Twice: as it is, compared with the paper's estimators, and with the released code's moving sum."""
    head = ClipHead(8, 8, 8, temperature=1.0, max_scale=1.0, learnable_temperature=False).to(numbers["script_image"])
    for config in ("script", "warm", "gamma", "vanilla", "frozen", "aligned"):
        case = {name.removeprefix(f"{config}_"): value for name, value in numbers.items() if name.startswith(config)}
        arguments = {name.removeprefix("arg_"): value.item() for name, value in case.items() if name.startswith("arg_")}
        tau = arguments["temperature"]
        # Text ids are a permutation of image ids in two configurations. Our batches have one id for both.
        aligned = torch.equal(case["image_ids"], case["text_ids"])
        order = torch.arange(40) if aligned else numbers["text_perm"]
        case |= {name: value[:, order] for name, value in case.items() if name.endswith("_T") and value.dim() == 2}
        log_ratio = math.log((40 - 1) / (8 - 1))
        both = {name: torch.stack([case[f"{name}_I"], case[f"{name}_T"]], dim=1) for name in ("s", "b", "exact_u")}
        # u of the paper. The released code keeps it as a sum s and a shift b.
        log_u = {"": both["s"].log() + both["b"] / tau + log_ratio, "exact_": both["exact_u"] + log_ratio}
        for prefix in ("exact_", ""):
            objective = NUCLR(
                tau, arguments["gamma"], -arguments["neg_zeta_init"], arguments["xi_init"], arguments["eta_init"],
                arguments["eta_I_ratio"], arguments["theta"], int(arguments["start_epochs"]), learn_zeta=True,
                positive="zeta" if arguments["vanilla"] else "xi", xi_update="epoch",
            ).to(head.image_projection)  # fmt: skip
            objective.allocate(40)
            objective.xi.fill_(arguments["xi_init"])  # exact in float64
            steps = defaultdict(list)
            for step, progress in enumerate(PROGRESS):
                # A seventh step, on the first batch, shows the xi that the sixth one has set.
                index = step % 6
                if step and not prefix:
                    # The released code multiplies a sum by exp(b_old - b_new), not exp((b_old - b_new) / tau).
                    shifted = log_u[""][step - 1] + (both["b"][step - 1] - both["b"][index]) * (1 - 1 / tau)
                    objective.log_u.copy_(shifted.where(objective.log_u != UNSET, UNSET))
                image, text = leaves(case["image"][index], case["text"][index])
                ids = case["image_ids"][index]
                loss = objective(head.similarity(image, text), Batch(ids, ids, ids), progress)
                gradients = torch.autograd.grad(loss.total, [image, text])
                values = {"loss": loss.total.detach(), "grad_image": gradients[0], "grad_text": gradients[1]}
                values |= {"zeta": objective.zeta, "z": objective.zeta_momentum, "log_u": objective.log_u}
                values |= {"xi": objective.xi, "eta": loss.logs["zeta_rate"]}
                for name, value in values.items():
                    steps[name].append(value.clone())
            ours = {name: torch.stack(value) for name, value in steps.items()}
            xi = ours.pop("xi")[1:]  # set at the beginning of the next epoch
            ours = {name: value[:6] for name, value in ours.items()}
            seen = ours["log_u"] != UNSET
            sums = ("exact_u_I", "exact_u_T") if prefix else ("s_I", "b_I", "s_T", "b_T")
            ratio = (ours["log_u"].where(seen, -math.inf) - log_u[prefix]).nan_to_num(nan=0.0).exp()
            yield Comparison(tuple(f"{config}_{name}" for name in sums), ratio, torch.ones_like(ratio))
            values = {name: ours[name] for name in ("loss", "grad_image", "grad_text")}
            state = {"zeta": ours["zeta"], "z": ours["z"].where(ours["z"] != UNSET, 0.0), "xi": xi}
            for side, letter in enumerate("IT"):
                values |= {f"{name}_{letter}": value[:, side] for name, value in state.items()}
            if not prefix:
                values |= {"eta_I": arguments["eta_I_ratio"] * ours["eta"], "eta_T": ours["eta"]}
            for name, value in values.items():
                yield Comparison((f"{config}_{prefix}{name}",), value, case[prefix + name])


def sogclr(numbers: Numbers) -> Iterator[Comparison]:
    """With two conventions of the released code: its first estimates, and the 1e-10 that it adds to its sums."""
    head = ClipHead(8, 8, 8, temperature=1.0, max_scale=1.0, learnable_temperature=False).to(numbers["script_image"])
    for config in ("script", "warm", "low"):
        case = {name.removeprefix(f"{config}_"): value for name, value in numbers.items() if name.startswith(config)}
        tau = case["temperature"].item()
        both = {name: torch.stack([case[f"{name}_I"], case[f"{name}_T"]], dim=1) for name in ("s", "b", "log_u")}
        objective = SogCLR(tau, case["gamma"].item(), positive_in_denominator=False).to(head.image_projection)
        objective.allocate(40)
        log_ratio = math.log((40 - 1) / (8 - 1))
        steps = defaultdict(list)
        for step, progress in enumerate(PROGRESS[:6]):
            ids = case["ids"][step]
            # In epoch 0 the estimate of a batch replaces u; later the first visit of a sample averages it with 0.
            old = objective.log_u[:, ids]
            objective.log_u[:, ids] = UNSET if progress.completed() == 0 else old.where(old != UNSET, -math.inf)
            image, text = leaves(case["image"][step], case["text"][step])
            similarity = head.similarity(image, text)
            objective(similarity, Batch(ids, ids, ids), progress)
            log_u, shift = objective.log_u[:, ids] - log_ratio, both["b"][step][:, ids]
            first, second = (
                scores.negatives(tau, 0.0).surrogate((log_u[side] - shift[side]).exp().add(1e-10).log() + shift[side])
                for side, scores in enumerate(similarity.directions)
            )
            gradients = torch.autograd.grad(first + second, [image, text])
            values = {"loss": (first + second).detach(), "grad_image": gradients[0], "grad_text": gradients[1]}
            for name, value in (values | {"log_u": objective.log_u}).items():
                steps[name].append(value.clone())
        ours = {name: torch.stack(value) for name, value in steps.items()}
        seen = ours["log_u"] != UNSET
        ours["log_u"] = (ours["log_u"] - log_ratio).where(seen, -math.inf)
        for names, expected in (
            (("log_u_I", "log_u_T"), both["log_u"]),
            (("s_I", "b_I", "s_T", "b_T"), both["s"].log() + both["b"]),
        ):
            ratio = (ours["log_u"] - expected).nan_to_num(nan=0.0).exp()
            yield Comparison(tuple(f"{config}_{name}" for name in names), ratio, torch.ones_like(ratio))
        for name in ("loss", "grad_image", "grad_text"):
            yield Comparison((f"{config}_{name}",), ours[name], case[name])


# Inputs.


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


Vectors = TypeVar("Vectors", bound=UnitVectorHead)


def with_identity(head: Vectors, like: Tensor) -> Vectors:
    """Return the head with the identity as projections, in the precision of `like`."""
    for projection in (head.image_projection, head.text_projection):
        projection.data = torch.eye(*projection.shape)
    return head.to(like)


def raw_and_unit(head: UnitVectorHead, raw: list[Tensor]) -> Iterator[tuple[str, list[Tensor], Similarity]]:
    """Yield leaves and their similarity twice: vectors that the head normalises, and unit vectors after that."""
    views = leaves(*raw)
    yield "raw", views, head(*map(Features, views))
    image, text = leaves(*(normalize(rows, dim=1) for rows in raw))
    yield "unit", [image, text], head.similarity(image, text)


def last_entry_is_weight(*sides: TokenPoints) -> None:
    """Set the projections: the first d entries of a token [d + 1] are its point, and the last one is its raw weight."""
    for side in sides:
        side.projection.data = torch.eye(*side.projection.shape).to(side.projection)
        side.weight_projection.data = torch.zeros_like(side.weight_projection)
        side.weight_projection.data[-1] = 1.0


def loss_of(objective: Objective, similarity: Similarity) -> Loss:
    ids = torch.arange(similarity.image_to_text.columns)
    return objective(similarity, Batch(ids, ids, ids), Progress(0, 1, len(ids), len(ids)))


@dataclass(frozen=True)
class File:
    """A file of tests/golden. row: methods and source. other: pattern of the arrays that are not compared."""

    compare: Callable[[Numbers], Iterator[Comparison]]
    row: tuple[str, str]
    other: str


FILES = {
    "clip": File(
        clip, ("clip, infonce", "mlfoundations/open_clip 89fb801, ClipLoss"), r"._(image_raw|text_raw|logit_scale)"
    ),
    "wpse_similarity": File(
        wpse_similarity,
        ("wpse, infonce", "sony/wpse c6a965d, its criterion"),
        r"(image|text)_(points|weights)|.*_omega|.*_phase|logit_scale",
    ),
    "kme": File(
        kme,
        ("kme, infonce", "sums over all pairs of points with 60 digits"),
        r"(image|text)_(points|weights)_raw|gamma|prop2_(tau|gamma|weight_raw)|g\d_naive(32|64)_finite",
    ),
    "cloob": File(
        cloob,
        ("cloob, infoloob, infonce", "ml-jku/cloob 357adda, ml-jku/hopfield-layers f56f929"),
        r"._(image_raw|text_raw|beta|inv_tau)",
    ),
    "nuclr": File(
        nuclr,
        ("cosine, nuclr", "bokun-wang/NUCLR ddaec8d, DGCL_Loss; the paper's estimators"),
        r"epochs|N|B|max_epoch|text_perm|[a-z]+_(arg_.*|image_ids|text_ids|image|text)",
    ),
    "sogclr": File(
        sogclr,
        ("cosine, sogclr", "bokun-wang/NUCLR ddaec8d, GCL_Loss"),
        r"epochs|N|B|max_epoch|[a-z]+_(gamma|temperature|ids|image|text)",
    ),
}

if __name__ == "__main__":
    run_main(main)
