"""Scores of images with texts, the positions of right answers, and accuracy and recall from exact counts.

Answers are in the order of descending scores; equal scores are in the order of their columns, as with argmax and a
stable sort. A model that gives all answers the same score is then right by chance, not always. Libraries with topk
do not define the order of equal scores and average in float32; percentages here are quotients of integers, equal on
all devices and for any number of ranks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError, number_of
from clipzoo.evaluation.datasets.dataset import RetrievalDataset
from clipzoo.model import Model
from clipzoo.runs.record import DEVIATION
from clipzoo.types import Embedding, Features, PointSet

BLOCK_POINT_PAIRS = 1 << 28
"""Pairs of points whose similarity is computed at a time; heads divide this further as they need."""
TEMPERATURES = [2 ** (quarter / 4) for quarter in range(-32, 17)]
"""Temperatures at which the confidence of a prediction is computed; between them it is interpolated in log T."""
BINS = 15
"""Bins of equal width of the expected calibration error."""


@torch.no_grad()
def score_blocks(model: Model, image: Embedding, text: Embedding) -> Iterator[tuple[int, Tensor]]:
    """Yield blocks of rows of the similarity matrix [n, k], with the index of each block's first row.

    Scores are in the head's own precision: bf16 and TF32 products change predictions (54 of 1000 in a trial of bf16).
    Raises ConfigError if a score is NaN.
    """
    points = math.prod(view.points.shape[1] for view in (image, text) if isinstance(view, PointSet))
    rows = max(1, BLOCK_POINT_PAIRS // (points * len(text)))
    for start in range(0, len(image), rows):
        with exact_products():
            scores = model.similarity(image[start : start + rows], text)
        if scores.isnan().any():
            raise ConfigError("the model's similarities are NaN: its weights are broken; evaluate another checkpoint")
        yield start, scores


@contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 matrices in float32, whatever precision training has set."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def positions(scores: Tensor, column: Tensor) -> Tensor:
    """scores [n, k], one answer's column per row [n] -> [n] int64, the number of answers before it; 0 for the best."""
    answer_scores = scores.gather(1, column[:, None])
    columns = torch.arange(scores.shape[1], device=scores.device)
    before = (scores > answer_scores) | ((scores == answer_scores) & (columns < column[:, None]))
    return before.sum(dim=1)


def accuracy(position: Tensor, labels: Tensor, classes: int, world: World) -> dict[str, float]:
    """Return top1, mean_per_class, and top5 for more than five classes, in percent over all ranks. Collective.

    position: [n] of the right class, 0 for the best. labels: [n]. mean_per_class: mean top-1 accuracy of the classes
    that have samples.
    """
    cutoffs = (1, 5) if classes > 5 else (1,)
    counts = [torch.bincount(labels[position < cutoff], minlength=classes) for cutoff in cutoffs]
    samples, *hits = world.sum(torch.stack([torch.bincount(labels, minlength=classes), *counts]))
    present = samples > 0
    per_class = hits[0][present].double() / samples[present]
    tops = {f"top{k}": 100 * int(row.sum()) / int(samples.sum()) for k, row in zip(cutoffs, hits, strict=True)}
    return {"top1": tops["top1"], "mean_per_class": 100 * per_class.mean().item(), **tops}


def recall(position: Tensor, cutoffs: Sequence[int], world: World) -> dict[str, float]:
    """Return recall_at_k for each cutoff k: percentage of queries whose position [n] is below k. Collective."""
    counts = torch.stack([*((position < cutoff).sum() for cutoff in cutoffs), torch.tensor(len(position)).to(position)])
    *hits, queries = world.sum(counts).tolist()
    return {f"recall_at_{cutoff}": 100 * count / queries for cutoff, count in zip(cutoffs, hits, strict=True)}


def macro_f1(predictions: Tensor, labels: Tensor, classes: int) -> float:
    """Return the mean F1 score in percent of the classes that have samples, as in WILDS, from [n] and [n]."""
    hits, predicted, samples = (
        torch.bincount(part, minlength=classes) for part in (labels[predictions == labels], predictions, labels)
    )
    present = samples > 0
    return 100 * (2 * hits / (predicted + samples).double())[present].mean().item()


def group_accuracies(position: Tensor, groups: Tensor, count: int, classes: int) -> tuple[dict[str, float], Tensor]:
    """Compare groups -> metrics in percent, and the top-1 accuracy of each group [count], NaN for an empty group.

    Metrics: worst_group_top1, worst_group_top5 for more than five classes, and group_gap, top-1 of the best group minus
    that of the worst. position, groups: [n]; samples of group -1 are in no group.
    """
    sizes = torch.bincount(groups[groups >= 0], minlength=count).double()
    top1, top5 = (100 * torch.bincount(groups[(groups >= 0) & (position < k)], minlength=count) / sizes for k in (1, 5))
    present = sizes > 0
    best, worst = top1[present].max().item(), top1[present].min().item()
    worst_top5 = {"worst_group_top5": top5[present].min().item()} if classes > 5 else {}
    return {"worst_group_top1": worst, **worst_top5, "group_gap": best - worst}, top1


def average_precision(scores: Tensor, is_member: Tensor) -> Tensor:
    """Scores [n, k] and memberships [n, k] -> [k]: mean over a class's images of the precision down to the image.

    Images are in the order of descending scores; equal scores are in the order of the images. This is the sum that
    CLIP_benchmark computes, and for distinct scores the area of scikit-learn, which has one threshold for equal scores.
    """
    member = is_member.gather(0, scores.argsort(dim=0, descending=True, stable=True)).double()
    rank = torch.arange(1, len(scores) + 1, dtype=torch.float64, device=scores.device)[:, None]
    return (member * member.cumsum(0) / rank).sum(0) / member.sum(0)


def log_confidences(scores: Tensor, scale: float) -> Tensor:
    """Logits scale * scores [b, k] -> [b, T]: log-probability of the best class at all TEMPERATURES."""
    below = scale * (scores - scores.amax(dim=1, keepdim=True))
    return -torch.stack([(below / temperature).exp().sum(dim=1) for temperature in TEMPERATURES], dim=1).log()


def calibration(log_confidence: Tensor, margin: Tensor, right: Tensor) -> dict[str, float]:
    """Return ece, fitted_ece and temperature.

    ece: expected calibration error of the softmax in percent, with BINS bins (Guo et al. 2017, eq. 3). fitted_ece: each
    half of the images, with even and odd indices, has the temperature of the highest likelihood of the other half.
    temperature: geometric mean of these two. log_confidence: [n, T], see `log_confidences`. margin: [n], logit of the
    best class minus that of the label. right: [n], whether the prediction is right.
    """
    confidence, margin = log_confidence.double(), margin.double()
    even = torch.arange(len(margin)) % 2 == 0
    temperatures = []
    for half in (~even, even):
        # The lowest mean negative log-likelihood: a parabola through three losses in log T.
        losses = (margin[half, None] / torch.tensor(TEMPERATURES) - confidence[half]).mean(dim=0).tolist()
        place, step = losses.index(min(losses)), 0.0
        if 0 < place < len(losses) - 1:
            before, lowest, after = losses[place - 1 : place + 2]
            bend = before - 2 * lowest + after
            step = (before - after) / (8 * bend) if bend > 0 else 0.0
        temperatures.append(TEMPERATURES[place] * 2**step)
    of_odd, of_even = temperatures
    fitted = torch.where(even, _at_temperature(confidence, of_odd), _at_temperature(confidence, of_even))
    return {
        "ece": _calibration_error(confidence[:, TEMPERATURES.index(1)], right),
        "fitted_ece": _calibration_error(fitted, right),
        "temperature": math.sqrt(of_odd * of_even),
    }


def _at_temperature(log_confidence: Tensor, temperature: float) -> Tensor:
    """[n, T] -> [n], at a temperature between the first and the last of TEMPERATURES."""
    place = 4 * math.log2(temperature / TEMPERATURES[0])
    left = min(int(place), len(TEMPERATURES) - 2)
    return torch.lerp(log_confidence[:, left], log_confidence[:, left + 1], place - left)


def _calibration_error(log_confidence: Tensor, right: Tensor) -> float:
    confidence = log_confidence.exp()
    bins = (confidence * BINS).ceil().long().sub(1).clamp(0, BINS - 1)
    return 100 * torch.bincount(bins, confidence - right.double()).abs().sum().item() / len(right)


def embed_draws(
    model: Model, draws: int, embed: Callable[[Features], Embedding], features: Features
) -> list[Embedding]:
    """Embed the same features under each of `draws` draws of the head's random features."""
    if draws == 1:
        return [embed(features)]
    embeddings = []
    for draw in range(draws):
        model.head.resample(draw)
        embeddings.append(embed(features))
    model.head.resample(0)
    return embeddings


def mean_over_draws(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over several draws, followed by its sample deviation; one draw is unchanged."""
    if len(metrics) == 1:
        return dict(metrics[0])
    summary: dict[str, float] = {}
    for name in metrics[0]:
        values = [draw[name] for draw in metrics]
        summary |= {name: statistics.fmean(values), f"{name}{DEVIATION}": statistics.stdev(values)}
    return summary


# Checks of datasets against faults that would give wrong numbers. where: dataset and split, for the message.


def check_labels(labels: Tensor, class_names: Sequence[str], where: str, complete: bool = False) -> None:
    """Raise ConfigError unless labels have class names; `complete`: two or more classes, all with samples."""
    if len(unnamed := labels[(labels < 0) | (labels >= len(class_names))]):
        raise ConfigError(f"{where}: label {int(unnamed[0])}, but its classes are 0 to {len(class_names) - 1}")
    if complete and len(class_names) < 2:
        raise ConfigError(f"{where}: {len(class_names)} class, nothing can be classified")
    if complete and (empty := (torch.bincount(labels, minlength=len(class_names)) == 0).nonzero().flatten().tolist()):
        shown, count = ", ".join(repr(class_names[index]) for index in empty[:5]), len(class_names)
        raise ConfigError(f"{where}: {len(empty)} of {number_of(count, 'class', 'es')} have no sample ({shown})")


def check_captions(dataset: RetrievalDataset, paired: bool) -> None:
    """Raise ConfigError unless captions belong to images and every image has one; `paired`: equally many."""
    caption_image, captions = torch.as_tensor(dataset.caption_image), len(dataset.captions)
    images, of_images, fault = len(dataset.images), number_of(len(dataset.images), "image"), ""
    if len(caption_image) != captions:
        fault = f"{number_of(captions, 'caption')}, but {len(caption_image)} entries in caption_image"
    elif captions == 0 or caption_image.min() < 0 or caption_image.max() >= images:
        fault = f"captions belong to images {caption_image.tolist()[:5]}..., but the dataset has {of_images}"
    else:
        counts = torch.bincount(caption_image, minlength=images)
        if missing := (counts == 0).nonzero().flatten().tolist():
            fault = f"{len(missing)} of {of_images} have no caption (the first is number {missing[0]})"
        elif paired and counts.min() != counts.max():
            unequal = f"images have {int(counts.min())} to {int(counts.max())} captions"
            fault = f"{unequal}, but the paired protocol needs equally many: set eval.paired=false"
    if fault:
        raise ConfigError(f"{dataset.name}: {fault}")
