"""Matching the joint distribution in maximum mean discrepancy (A mathematical perspective ..., problem 3.11)."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from clipzoo.heads.cost import FLOAT, Shape
from clipzoo.heads.vector import PERSPECTIVE
from clipzoo.heads.wpse import Kernel
from clipzoo.objectives.base import Objective, kernel_matrix, weighted_loss
from clipzoo.types import Batch, Loss, Progress, Scores, Similarity, World, checked


@checked
class MMDJoint(Objective):
    """-2 E k(x, y) + E k(y, y'), x a true pair, y and y' pairs (u_i, v_j) drawn with P_ij = exp S_ij / sum exp S.

    k((u, v), (u', v')) = image_kernel(u, u') text_kernel(v, v'), on raw inputs. Mean of both directions, which are
    equal for heads with one matrix. Costs 2 N^3 multiplications over all ranks.

    image_kernel, text_kernel: kernels on raw inputs. median_unit: measure distances in the batch's median distance.
    """

    name = "mmd_joint"
    citations = (PERSPECTIVE,)
    reads_views = True

    def __init__(self, image_kernel: Kernel, text_kernel: Kernel, median_unit: bool) -> None:
        super().__init__()
        self._kernels = image_kernel, text_kernel
        self._median_unit = self.needs_negatives = median_unit

    @classmethod
    def cost(cls, shape: Shape, embedding: float, views: float) -> float:
        """Raw inputs, a row of P [N] and its gradient, and partition sums, in both directions."""
        return views + 4 * FLOAT * shape.batch + 16

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        world = similarity.world
        dtype = similarity.image_to_text.positives().dtype
        views = zip((batch.image, batch.text), self._kernels, strict=True)
        images, texts = [kernel_matrix(view, kernel, self._median_unit, dtype, world) for view, kernel in views]
        from_images = partial(_discrepancy, anchors=images, contrasts=texts, world=world)
        from_texts = partial(_discrepancy, anchors=texts, contrasts=images, world=world)
        return weighted_loss(similarity, (0.5, 0.5), from_images, from_texts)


def _discrepancy(scores: Scores, anchors: Tensor, contrasts: Tensor, world: World) -> Tensor:
    """anchors, contrasts: kernel matrices [N, N] of the samples of the rows and of the columns."""
    log_partition = world.gather(scores.log_sum_exp()).logsumexp(dim=0)
    local = (scores.dense() - log_partition).exp()  # [b, N], this rank's rows of P
    rows = slice(scores.first_positive, scores.first_positive + len(local))
    smoothed = anchors[rows] @ world.gather(local) @ contrasts  # [b, N]
    fit = smoothed.diagonal(scores.first_positive).mean()
    # Factor N / b: this rank has b of the N rows, and the mean over ranks must be the sum over all rows.
    return (local * smoothed).sum() * (scores.columns / len(local)) - 2 * fit
