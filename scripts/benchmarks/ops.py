"""Time and memory of the score kernels compared with naive forms, a compiled naive form and open_clip's loss.

    python scripts/benchmark.py ops --cases kme-128 vectors-8192 --repeats 7 --output docs/benchmarks/readings/ops.json

One thread; every contender runs forward and backward once a round, in turn, and the medians of the process's CPU
seconds are compared, so that a busy machine slows all alike. Memory is the peak of the resident set above what the
process held before the run, gradients included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor
from torch.nn import functional

from benchmarks import built, in_turn, log, medians, publish
from benchmarks.measurement import CPU, Run, extra_mib, seconds
from clipzoo import Batch, PointSet, Progress, Scores, Similarity, World
from clipzoo.cli.arguments import Parser, number_in
from clipzoo.config.vocabulary import Count
from clipzoo.heads import wpse
from clipzoo.heads.kme import merged
from clipzoo.heads.scores import DenseScores, tiled_anchors, tiled_scores
from clipzoo.objectives.infoloob import leave_one_out
from clipzoo.objectives.infonce import cross_entropy
from clipzoo.ops.kme import kme_score

Contenders = dict[str, Run]
TILE = 1024


def add_options(parser: Parser) -> None:
    parser.add_argument(
        "--cases", nargs="+", choices=[*CASES, *ON_RANKS], default=[*CASES, *ON_RANKS], help="all by default"
    )
    parser.add_argument("--contenders", nargs="+", default=None, help="only these")
    parser.add_argument("--repeats", type=number_in(Count), default=5)
    parser.add_argument("--precision", choices=["highest", "high", "medium"], default="highest", help="torch's setting")


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(options.precision)
    results = []
    for case in options.cases:
        if case in ON_RANKS:
            measured = _on_ranks(options, *ON_RANKS[case])
        else:
            make, *arguments = CASES[case]
            measured = measure(make(*arguments), options)
        results.append({"case": case, "precision": options.precision, **measured})
        log(json.dumps(results[-1]))
    publish(options, {"torch": torch.__version__, "results": results})


def measure(contenders: Contenders, options: argparse.Namespace) -> dict[str, Any]:
    """Median CPU seconds, peak extra MiB, and each contender's seconds over the first's."""
    contenders = {name: run for name, run in contenders.items() if name in (options.contenders or contenders)}
    memory = {name: round(extra_mib(run, CPU), 1) for name, run in contenders.items()}
    runs = {name: lambda run=run: seconds(run, CPU) for name, run in contenders.items()}
    times = medians(in_turn(runs, options.repeats))
    ours = next(iter(times.values()))
    return {
        "cpu_seconds": {name: round(value, 4) for name, value in times.items()},
        "extra_mib": memory,
        "times_ours": {name: round(value / ours, 2) for name, value in times.items()},
    }


def kme_contenders(
    samples: int, image_points: int, text_points: int, width: int, valid: int, gamma: float
) -> Contenders:
    """`valid` points of each caption's `text_points` are real."""
    image, image_weights, text, text_weights = _point_sets(samples, image_points, text_points, width, valid)
    leaves = [leaf.requires_grad_() for leaf in (image, image_weights, text, text_weights, torch.tensor(gamma))]
    target = torch.arange(samples)

    def contender(score: Callable[..., Tensor]) -> Run:
        return lambda: torch.autograd.grad(functional.cross_entropy(score(*leaves), target), leaves)

    compiled = torch.compile(naive_kme)
    return {"clipzoo": contender(kme_score), "naive": contender(naive_kme), "compiled": contender(compiled)}


def kme_points(samples: int, image_points: int, width: int, kept: int, valid: int = 77) -> Contenders:
    """KME of captions with 77 points, `valid` of them real; images exact and merged to `kept` points (`head.merge`).

    With all points kept: captions of 12 tokens, whose 65 other positions are one point or 65.
    """
    image, image_weights, text, text_weights = _point_sets(samples, image_points, 77, width, valid)
    padded = text.clone()
    padded[:, 12:] = text[:1, 12:13]
    target, gamma = torch.arange(samples), torch.tensor(7.14).requires_grad_()

    def contender(text: Tensor, merge: bool) -> Run:
        leaves = [leaf.clone().requires_grad_() for leaf in (image, image_weights, text, text_weights)]

        def run() -> object:
            images = PointSet(*leaves[:2])
            images = merged(images, kept) if merge else images
            scores = kme_score(images.points, images.log_weights, leaves[2], leaves[3], gamma)
            return torch.autograd.grad(functional.cross_entropy(scores, target), (*leaves, gamma))

        return run

    if kept < image_points:
        return {"merged": contender(text, True), "exact": contender(text, False)}
    return {"identical": contender(padded, False), "different": contender(text, False)}


def _point_sets(samples: int, image_points: int, text_points: int, width: int, valid: int) -> list[Tensor]:
    """Unit points and log-weights of images and of captions, of which `valid` points are real."""
    draws = seeded(0)
    sets = []
    for points in (image_points, text_points):
        vectors = torch.randn(samples, points, width, generator=draws)
        sets += [functional.normalize(vectors, dim=-1), torch.randn(samples, points, generator=draws)]
    sets[3][:, valid:] = float("-inf")
    return sets


def naive_kme(points: Tensor, log_weights: Tensor, points2: Tensor, log_weights2: Tensor, gamma: Tensor) -> Tensor:
    cosines = torch.einsum("bid,cjd->bcij", points, points2)
    weights = log_weights[:, None, :, None] + log_weights2[None, :, None, :]
    return (weights + 2 * gamma * (cosines - 1)).logsumexp(dim=(2, 3))


def seeded(seed: int) -> torch.Generator:
    """A generator of random numbers on torch's default device, which another program may have set to a GPU."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def wave_contenders(samples: int, points: int, width: int, count: int) -> Contenders:
    """WPSE's random features, summed over the points of each sample."""
    generator = seeded(0)
    vectors = functional.normalize(torch.randn(samples, points, width, generator=generator), dim=-1).requires_grad_()
    weights = torch.randn(samples, points, generator=generator).requires_grad_()
    frequencies, phases = torch.randn(count, width, generator=generator), torch.rand(count, generator=generator)
    upstream = torch.randn(samples, count, generator=generator)

    def contender(pooled_waves: Callable[..., Tensor]) -> Run:
        return lambda: torch.autograd.grad(
            pooled_waves(vectors, weights, frequencies, phases), (vectors, weights), upstream
        )

    naive = wpse.pooled_waves_reference
    ours, compiled = wpse.pooled_waves, torch.compile(naive)
    return {"clipzoo": contender(ours), "naive": contender(naive), "compiled": contender(compiled)}


def vector_contenders(samples: int, width: int, rank: int = 0, ranks: int = 1) -> Contenders:
    """InfoNCE and InfoLOOB of unit vectors with a learnable scale, `samples` in all."""
    from open_clip.loss import ClipLoss

    generator = seeded(rank)
    image, text = (
        functional.normalize(torch.randn(samples // ranks, width, generator=generator), dim=-1).requires_grad_()
        for _ in range(2)
    )
    scale = torch.tensor(1 / 0.07).requires_grad_()
    leaves = image, text, scale
    world = World.from_process_group()
    peer = ClipLoss(local_loss=ranks > 1, gather_with_grad=ranks > 1, rank=rank, world_size=ranks)

    def tiled(loss: Callable[[Scores], Tensor]) -> Run:
        def run() -> object:
            directions = tiled_scores(scale * image, world.gather(text), TILE, world)
            total = torch.stack([loss(scores) for scores in directions]).sum()
            return torch.autograd.grad(total, leaves)

        return run

    return {
        "clipzoo": tiled(cross_entropy),
        "clipzoo infoloob": tiled(leave_one_out),
        "open_clip": lambda: torch.autograd.grad(peer(image, text, scale), leaves),
    }


def siglip_contenders(samples: int, width: int) -> Contenders:
    """SigLIP's loss of unit vectors with a learnable scale and bias, compared with open_clip's."""
    from open_clip.loss import SigLipLoss

    leaves = *_unit_vectors(samples, width), torch.tensor(10.0).requires_grad_(), torch.tensor(-10.0).requires_grad_()
    image, text, scale, bias = leaves
    peer = SigLipLoss()

    def tiled() -> object:
        losses = [scores.binary_cross_entropy(scale, bias) for scores in tiled_scores(image, text, TILE)]
        return torch.autograd.grad((losses[0] + losses[1]) / 2, leaves)

    return {"clipzoo": tiled, "open_clip": lambda: torch.autograd.grad(peer(image, text, scale, bias), leaves)}


def objective_contenders(name: str, samples: int, width: int) -> Contenders:
    """An objective of cosines in tiles, compared with the same objective on the matrix."""
    _, objective, _ = built("encoder=tiny", "head=cosine", f"objective={name}")
    objective.allocate(4 * samples)
    image, text = _unit_vectors(samples, width)
    batch, progress = Batch(image, text, torch.arange(samples)), Progress(20, 32, 4 * samples, samples)

    def gradient(similarity: Similarity) -> object:
        return torch.autograd.grad(objective(similarity, batch, progress).total, (image, text))

    def tiled() -> object:
        within = (lambda: tiled_anchors(image, image, TILE)), (lambda: tiled_anchors(text, text, TILE))
        return gradient(Similarity(*tiled_scores(image, text, TILE), *within))

    def dense() -> object:
        matrix = image @ text.mT
        within = (lambda: DenseScores(image @ image.mT)), (lambda: DenseScores(text @ text.mT))
        return gradient(Similarity(DenseScores(matrix), DenseScores(matrix.mT), *within))

    return {"clipzoo": tiled, "matrix": dense}


def _unit_vectors(samples: int, width: int) -> tuple[Tensor, Tensor]:
    """Images [samples, width], and texts that resemble them."""
    generator = seeded(0)
    image = functional.normalize(torch.randn(samples, width, generator=generator), dim=-1)
    text = functional.normalize(image + 0.05 * torch.randn(samples, width, generator=generator), dim=-1)
    return image.requires_grad_(), text.requires_grad_()


def _on_ranks(options: argparse.Namespace, ranks: int, samples: int, width: int) -> dict[str, Any]:
    """Every rank's measures, as the mean over ranks."""
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.NamedTemporaryFile() as meeting:
        multiprocessing.spawn(_rank, (options, ranks, samples, width, meeting.name, queue), nprocs=ranks)
    answers = [queue.get() for _ in range(ranks)]
    return {
        key: {name: round(statistics.mean(answer[key][name] for answer in answers), 4) for name in values}
        for key, values in answers[0].items()
    }


def _rank(rank: int, options: argparse.Namespace, ranks: int, samples: int, width: int, file: str, queue: Any) -> None:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(options.precision)
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    queue.put(measure(vector_contenders(samples, width, rank, ranks), options))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


CASES: dict[str, tuple[Any, ...]] = {
    "kme-128": (kme_contenders, 128, 50, 32, 128, 32, 7.14),
    "kme-128-sharp": (kme_contenders, 128, 50, 32, 128, 32, 50.0),
    "kme-256": (kme_contenders, 256, 50, 32, 128, 32, 7.14),
    "kme-captions": (kme_contenders, 128, 50, 77, 128, 12, 7.14),
    "kme-full": (kme_contenders, 16, 197, 77, 512, 77, 7.14),
    "kme-padding": (kme_points, 128, 50, 128, 50),
    "kme-merged": (kme_points, 64, 197, 512, 50),
    "kme-merged-captions": (kme_points, 128, 197, 512, 50, 12),
    "waves-64": (wave_contenders, 64, 197, 512, 1024),
    "vectors-8192": (vector_contenders, 8192, 512),
    "siglip-8192": (siglip_contenders, 8192, 512),
    **{
        f"{name}-8192": (objective_contenders, name, 8192, 512)
        for name in ("dcl", "cyclip", "sogclr", "isogclr", "nuclr")
    },
}
"""Function that makes the contenders of a case, and its arguments."""
ON_RANKS = {"vectors-8192-ranks": (2, 8192, 512)}
"""Ranks, samples and width of the cases of `vector_contenders` on several ranks."""
