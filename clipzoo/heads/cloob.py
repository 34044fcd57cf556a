"""CLOOB: cosines of patterns that modern Hopfield networks retrieve from the batch (Fuerst et al. 2022)."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated

from torch import Tensor
from torch.nn import functional

from clipzoo.errors import ConfigError
from clipzoo.heads.base import FLOAT, NEURIPS, Cost, Paper, Shape, cost_of_vectors, projections
from clipzoo.heads.pairs import Scope
from clipzoo.heads.vector import UnitVectorHead
from clipzoo.types import Count, NonNegativeCount, Range, Scale, Similarity, Widths, checked

CLOOB = Paper(
    "cloob",
    "CLOOB: Modern Hopfield Networks with InfoLOOB Outperform CLIP",
    'F{\\"u}rst, Andreas and others',
    NEURIPS,
    2022,
)


@checked
class CloobHead(UnitVectorHead):
    """logits = inverse_temperature * cosine; in training, of patterns retrieved from the global batch.

    With images X, texts Y and R(q; memory) = unit(softmax(beta q memory^T) memory), the two directions are
    U_x U_y^T, U = R(.; X), and V_y V_x^T, V = R(.; Y), which are not transposes of each other.
    Evaluation compares the plain embeddings.

    inverse_temperature: fixed. hopfield: False trains on the plain embeddings (the ablation of table 2).
    beta: inverse temperature of the retrieval.
    hopfield_start: first step with retrieval; earlier ones compare the plain embeddings. At the start embeddings of one
        modality are nearly parallel, and their retrieved patterns are nearly equal.
    """

    citations = (CLOOB,)
    published_with = ("infoloob", "infonce")

    def __init__(
        self,
        image_width: Count,
        text_width: Count,
        embed_width: Count,
        inverse_temperature: Scale,
        hopfield: bool,
        beta: Annotated[float, Range(at_least=0, at_most=1e6)],
        hopfield_start: NonNegativeCount = 0,
        matryoshka: Widths = (),
    ) -> None:
        super().__init__(image_width, text_width, embed_width, matryoshka=matryoshka)
        self._inverse_temperature, self._beta = inverse_temperature, beta
        self._hopfield, self._hopfield_start, self._step = hopfield, hopfield_start, 0
        self.score_range = -inverse_temperature, inverse_temperature

    @classmethod
    def cost(cls, shape: Shape) -> Cost:
        """Four retrievals from N patterns by memory-efficient attention, then two one-way products."""
        retrieve = 4 * (4 + 10) * shape.local * shape.batch * shape.width
        product = cost_of_vectors(shape, shape.width, 0.0)
        flops = projections(shape) + retrieve + 2 * product.flops
        exchanged = product.exchanged if shape.tiled else 0.0
        return Cost(flops, 4 * shape.width, exchanged, product.scores, points=4 * shape.batch * shape.width * FLOAT)

    def factors(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return self._inverse_temperature * image, text

    def log_cosine_scale(self) -> Tensor:
        """Return the log of the factor of the cosine; evaluation compares plain embeddings."""
        return self.image_projection.new_tensor(math.log(self._inverse_temperature))

    def resample(self, index: int) -> None:
        """Record the step, `index`; nothing is drawn."""
        self._step = index

    def memory_weights(self, query: Tensor, memory: Tensor) -> Tensor | None:
        """softmax(beta q memory^T), [b, N] (eq. 9); None for the ablation."""
        return (self._beta * query @ memory.mT).softmax(dim=1) if self._hopfield else None

    def similarity(self, image: Tensor, text: Tensor, scope: Scope = Scope()) -> Similarity:
        """[b, d] embeddings -> scores of the retrieved patterns, with the full gradient through every rank's memory."""
        if not self._hopfield or self._step < self._hopfield_start:
            return super().similarity(image, text, scope)
        if scope.pairing is not None:
            raise ConfigError(
                "head.hopfield=true retrieves patterns from one caption of each image: give head.hopfield=false, or "
                "objective.same_caption=negative and one caption (data.views)"
            )
        images, texts = scope.gather(image), scope.gather(text)
        image_of_image, image_of_text = self.retrieve(image, images), self.retrieve(text, images)  # U_x, U_y
        text_of_image, text_of_text = self.retrieve(image, texts), self.retrieve(text, texts)  # V_x, V_y
        return Similarity(
            self.anchored(image_of_image, image_of_text, scope),
            self.anchored(text_of_text, text_of_image, scope),
            partial(self.anchored, image_of_image, image_of_image, scope),
            partial(self.anchored, text_of_text, text_of_text, scope),
        )

    def retrieve(self, query: Tensor, memory: Tensor) -> Tensor:
        """[b, d] and [N, d] -> [b, d], one normalised update of the Hopfield network (eq. 9 and 10).

        This is attention with one head, which torch computes without the matrix of attention weights [b, N].
        """
        patterns = memory[None, None]
        retrieved = functional.scaled_dot_product_attention(query[None, None], patterns, patterns, scale=self._beta)
        return functional.normalize(retrieved[0, 0], dim=-1)
