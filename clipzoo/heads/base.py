"""What every similarity head can do."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Generic

import torch
from torch import Tensor, nn

from clipzoo.distributed import collectives as distributed
from clipzoo.similarity.dense import DenseScores
from clipzoo.types import EmbeddingKind, Features, Similarity


class Head(nn.Module, Generic[EmbeddingKind]):
    """Owns projections, weights and temperature; turns two modalities' features into similarities.

    A subclass defines `embed_image`, `embed_text`, `score`, `ensemble` and `probe`, and states the facts below.
    The trainer runs heads outside autocast, on features in the precision of the head's parameters.
    """

    needs_tokens: bool = False
    """Reads Features.tokens."""
    needs_padding: bool = False
    """Padding tokens are points of their own, so captions must not be trimmed to the batch's longest."""
    stochastic: bool = False
    """Draws random features: `resample` changes the scores."""
    learnable_temperature: bool = False
    """Some parameter scales the scores; an objective with a temperature of its own cannot use them."""
    compares_within: bool = True
    """`similarity` offers `within_image` and `within_text`."""
    tile: int | None = None
    """Rows and columns of a tile where a vector head keeps no matrix; None: a matrix. Set by the trainer."""
    published_with: tuple[str, ...] = ()
    """Names of the objectives (`Objective.name`) that the papers trained this head with."""

    @property
    @abstractmethod
    def score_range(self) -> tuple[float, float]:
        """Bounds of `score` over all inputs and all values that the parameters may take; +-inf where there is none."""

    @abstractmethod
    def embed_image(self, features: Features) -> EmbeddingKind:
        """[b, ...] -> a row per image."""

    @abstractmethod
    def embed_text(self, features: Features) -> EmbeddingKind:
        """[b, ...] -> a row per caption."""

    @abstractmethod
    def score(self, image: EmbeddingKind, text: EmbeddingKind) -> Tensor:
        """n image and k text embeddings -> [n, k], the logits that the objective sees. Blocks equal the whole."""

    @abstractmethod
    def ensemble(self, prompts: EmbeddingKind) -> EmbeddingKind:
        """The p text embeddings of one class's prompts -> one row. One prompt comes back unchanged."""

    @abstractmethod
    def probe(self, features: Features, where: str) -> Tensor:
        """Image features for a linear probe, [b, w]; `where` is "before" or "after" the projection."""

    def forward(self, image: Features, text: Features) -> Similarity:
        """Features of the b local pairs -> similarities against the global batch: embed, gather, score."""
        return self.similarity(self.embed_image(image), self.embed_text(text))

    def similarity(self, image: EmbeddingKind, text: EmbeddingKind) -> Similarity:
        """Local embeddings -> similarities against the global batch."""
        all_texts = distributed.gather_embedding(text)
        first = distributed.rank() * len(image)
        # Each rank scores its own images with all texts, once: the other direction is the same matrix, redistributed.
        image_to_text = self.score(image, all_texts)
        return Similarity(
            DenseScores(image_to_text, first),
            DenseScores(distributed.transposed(image_to_text), first),
            within_image=lambda: DenseScores(self.score(image, distributed.gather_embedding(image)), first),
            within_text=lambda: DenseScores(self.score(text, all_texts), first),
        )

    def resample(self, index: int) -> None:
        """Draw the random features number `index`: the step in training mode, the draw in evaluation mode.

        Equal on all ranks and for both modalities without communication. Nothing to do for a deterministic head.
        """

    @torch.no_grad()
    def clamp_(self) -> None:
        """Bring parameters back into their range after an optimiser step."""

    def logs(self) -> Mapping[str, Tensor]:
        """Scalars worth a curve: temperature, gamma."""
        return {}
