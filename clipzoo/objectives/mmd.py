"""Matching distributions in maximum mean discrepancy (A mathematical perspective on contrastive learning).

The kernels compare raw images and captions; the model's scores are the distributions.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from clipzoo.heads.base import FLOAT, Shape
from clipzoo.heads.vector import PERSPECTIVE
from clipzoo.heads.wpse import Kernel
from clipzoo.objectives.base import Objective, weighted_loss
from clipzoo.types import Batch, Loss, Progress, Scores, Similarity, Weight, World, checked


@checked
class MMDConditional(Objective):
    """lambda_u L(u|v) + lambda_v L(v|u), u the image and v the text.

    L(u|v) = E[ 1/2 sum_jk p_j p_k k(u_j, u_k) - sum_k p_k k(u_i, u_k) ] over the texts v_i, p the softmax of their
    scores: half the squared discrepancy between p and the positive's point mass, up to a constant. The paper's
    appendix B prints it with the opposite signs.

    image_kernel, text_kernel: kernels on raw inputs. median_unit: measure distances in the batch's median distance.
    exclude_diagonal: leave out j = k and k = i and average over the rest: the unbiased estimate of the appendix.
    """

    name = "mmd_conditional"
    reads_views = True
    citations = (PERSPECTIVE,)
    relations = {"lambda_u + lambda_v > 0": "one of the weights must be above 0"}

    def __init__(
        self,
        lambda_u: Weight,
        lambda_v: Weight,
        image_kernel: Kernel,
        text_kernel: Kernel,
        median_unit: bool,
        exclude_diagonal: bool,
    ) -> None:
        super().__init__()
        self._weights = lambda_v, lambda_u
        self._kernels = image_kernel, text_kernel
        self._median_unit = median_unit
        self._exclude_diagonal = exclude_diagonal
        self.needs_negatives = median_unit or exclude_diagonal

    def cost(self, shape: Shape, embedding: float, views: float) -> float:
        return views

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        image_kernel, text_kernel = self._kernels
        of_texts = partial(self._discrepancy, view=batch.text, kernel=text_kernel, world=similarity.world)
        of_images = partial(self._discrepancy, view=batch.image, kernel=image_kernel, world=similarity.world)
        return weighted_loss(similarity, self._weights, of_texts, of_images)

    def _discrepancy(self, scores: Scores, view: Tensor, kernel: Kernel, world: World) -> Tensor:
        """view: raw inputs of the samples of the columns."""
        log_probabilities = scores.dense() - scores.log_sum_exp()[:, None]
        probabilities = log_probabilities.exp()
        values = kernel_matrix(view, kernel, self._median_unit, probabilities.dtype, world)
        if self._exclude_diagonal:
            values = values.fill_diagonal_(0) * (scores.columns / (scores.columns - 1))
        smoothed = probabilities @ values  # [b, N]
        return (torch.linalg.vecdot(probabilities, smoothed) / 2 - smoothed.diagonal(scores.first_positive)).mean()


@checked
class MMDJoint(Objective):
    """-2 E k(x, y) + E k(y, y'), x a true pair, y and y' pairs (u_i, v_j) drawn with P_ij = exp S_ij / sum exp S.

    k((u, v), (u', v')) = image_kernel(u, u') text_kernel(v, v'), on raw inputs. Mean of both directions, which are
    equal for heads with one matrix. Costs 2 N^3 multiplications over all ranks.

    image_kernel, text_kernel: kernels on raw inputs. median_unit: measure distances in the batch's median distance.
    """

    name = "mmd_joint"
    reads_views = True
    citations = (PERSPECTIVE,)

    def __init__(self, image_kernel: Kernel, text_kernel: Kernel, median_unit: bool) -> None:
        super().__init__()
        self._kernels = image_kernel, text_kernel
        self._median_unit = self.needs_negatives = median_unit

    def cost(self, shape: Shape, embedding: float, views: float) -> float:
        """Raw inputs, a row of P [N] and its gradient, and partition sums, in both directions."""
        return views + 4 * FLOAT * shape.batch + 16

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        world = similarity.world
        dtype = similarity.image_to_text.positives().dtype
        views = zip((batch.image, batch.text), self._kernels, strict=True)
        images, texts = [kernel_matrix(view, kernel, self._median_unit, dtype, world) for view, kernel in views]
        from_images = partial(_joint_discrepancy, anchors=images, contrasts=texts, world=world)
        from_texts = partial(_joint_discrepancy, anchors=texts, contrasts=images, world=world)
        return weighted_loss(similarity, (0.5, 0.5), from_images, from_texts)


def _joint_discrepancy(scores: Scores, anchors: Tensor, contrasts: Tensor, world: World) -> Tensor:
    """anchors, contrasts: kernel matrices [N, N] of the samples of the rows and of the columns."""
    log_partition = world.gather(scores.log_sum_exp()).logsumexp(dim=0)
    local = (scores.dense() - log_partition).exp()  # [b, N], this rank's rows of P
    rows = slice(scores.first_positive, scores.first_positive + len(local))
    smoothed = anchors[rows] @ world.gather(local) @ contrasts  # [b, N]
    fit = smoothed.diagonal(scores.first_positive).mean()
    # Factor N / b: this rank has b of the N rows, and the mean over ranks must be the sum over all rows.
    return (local * smoothed).sum() * (scores.columns / len(local)) - 2 * fit


def kernel_matrix(
    view: Tensor, kernel: Kernel, median_unit: bool, dtype: torch.dtype, world: World = World()
) -> Tensor:
    """Return the kernel matrix of one view of the global batch: [b, ...], the local samples -> [N, N].

    Floats are compared unchanged, uint8 images as fractions of 255, token ids as bags of words (counts of ids; id 0 is
    padding). median_unit: distances are divided by the median distance of two different samples of the batch.
    """
    if view.ndim == 2 and view.dtype == torch.int64:
        # Ranks may have trimmed their captions to different lengths.
        longest = int(world.maximum(view.new_full((), view.shape[1])))
        view = functional.pad(view, (0, longest - view.shape[1]))
    flat = world.gather(view).flatten(1)
    if flat.is_floating_point():
        entries = flat.to(dtype)
    elif flat.dtype == torch.uint8:
        entries = flat.to(dtype) / 255
    else:
        ids, position = flat.unique(return_inverse=True)
        entries = torch.zeros(len(flat), len(ids), dtype=dtype, device=flat.device)
        entries.scatter_add_(1, position, (flat != 0).to(dtype))

    # Squared distances [N, N]. Centred: far from the origin they would be differences of large numbers.
    entries = entries - entries.mean(dim=0)
    norms = entries.square().sum(dim=1)
    sums = norms[:, None] + norms
    squared = (sums - 2 * entries @ entries.mT).fill_diagonal_(0)
    # Distances of equal samples are rounding errors; if most samples are equal, these would become the unit.
    squared = squared.masked_fill(squared <= 16 * torch.finfo(dtype).eps * sums, 0)
    if median_unit:
        rows, columns = torch.triu_indices(len(squared), len(squared), offset=1, device=squared.device)
        squared = squared / squared[rows, columns].median().clamp(min=torch.finfo(dtype).tiny)
    return kernel.value(squared)
