"""CyCLIP: InfoNCE with consistent geometry across and inside the modalities (Goel et al. 2022)."""

from __future__ import annotations

from clipzoo.heads.base import Head, Paper, Shape
from clipzoo.objectives.base import LogitScale, Objective
from clipzoo.objectives.infonce import cross_entropy
from clipzoo.types import Batch, Loss, Positive, Progress, Scale, Similarity, Weight, checked


@checked
class CyCLIP(Objective):
    """CLIP's loss + cross_modal * 1/N sum_ij (s(x_i, y_j) - s(x_j, y_i))^2
    + in_modal * 1/N sum_ij (s(x_i, x_j) - s(y_i, y_j))^2, s the cosine.

    temperature: temperature of CLIP's loss; initial value if `learnable_temperature`.
    learnable_temperature: train it; False fixes it. max_scale: upper bound of 1 / temperature.
    in_modal, cross_modal: weights of the consistency terms.
    """

    name = "cyclip"
    citations = (
        Paper(
            "cyclip",
            "CyCLIP: Cyclic Contrastive Language-Image Pretraining",
            "Goel, Shashank and others",
            "Advances in Neural Information Processing Systems",
            2022,
        ),
    )
    own_temperature = True

    relations = {"at_most(1 / temperature, max_scale)": "the scale 1 / temperature must not exceed its bound max_scale"}

    def __init__(
        self,
        temperature: Scale,
        learnable_temperature: bool,
        max_scale: Positive,
        in_modal: Weight,
        cross_modal: Weight,
    ) -> None:
        super().__init__()
        self.scale = LogitScale(1 / temperature, learnable_temperature, max_scale)
        self._in_modal, self._cross_modal = in_modal, cross_modal

    def cost(self, shape: Shape, embedding: float, views: float) -> float:
        """Images are gathered; tiles of images by images and of captions by captions gather both once more."""
        return 3 * embedding if shape.tiled else embedding

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        image_to_text, text_to_image = similarity.directions
        scale = self.scale()
        first, second = (cross_entropy(scores.scaled(scale.mul)) for scores in similarity.directions)
        contrastive = (first + second) / 2
        # Squared differences, summed over the N scores of an anchor and averaged over the local anchors.
        cross_modal = image_to_text.squared_distance(text_to_image).mean()
        assert similarity.within_image is not None and similarity.within_text is not None, "check() refuses such heads"
        in_modal = similarity.within_image().squared_distance(similarity.within_text()).mean()
        terms = {"contrastive": contrastive, "cross_modal": cross_modal, "in_modal": in_modal}
        logs = {f"loss_{name}": term.detach() for name, term in terms.items()} | {"logit_scale": scale.detach()}
        return Loss(contrastive + self._cross_modal * cross_modal + self._in_modal * in_modal, logs)

    def check(self, head: Head) -> list[str]:
        reasons = super().check(head)
        if not head.compares_within:
            reasons.append(
                f"objective cyclip compares images with images, which head {type(head).__name__} does not: "
                "use head=cosine"
            )
        return reasons
