"""Matching the conditionals in maximum mean discrepancy (A mathematical perspective ..., appendix B)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from clipzoo.heads.cost import Shape
from clipzoo.heads.vector import PERSPECTIVE
from clipzoo.heads.wpse import Kernel
from clipzoo.objectives.base import Objective, kernel_matrix, weighted_loss
from clipzoo.types import Batch, Loss, Progress, Scores, Similarity, Weight, World, checked


@checked
class MMDConditional(Objective):
    """lambda_u L(u|v) + lambda_v L(v|u), u the image and v the text.

    L(u|v) = E[ 1/2 sum_jk p_j p_k k(u_j, u_k) - sum_k p_k k(u_i, u_k) ] over the texts v_i, p the softmax of their
    scores: half the squared discrepancy between p and the positive's point mass, up to a constant. The paper's appendix
    prints it with the opposite signs.

    image_kernel, text_kernel: kernels on raw inputs. median_unit: measure distances in the batch's median distance.
    exclude_diagonal: leave out j = k and k = i and average over the rest: the unbiased estimate of the appendix.
    """

    name = "mmd_conditional"
    citations = (PERSPECTIVE,)
    reads_views = True

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

    @classmethod
    def cost(cls, shape: Shape, embedding: float, views: float) -> float:
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
