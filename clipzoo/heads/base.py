"""What every similarity head can do."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Generic

import torch
from torch import Tensor, nn

from clipzoo.distributed.world import World
from clipzoo.similarity.dense import DenseScores
from clipzoo.types import EmbeddingKind, Features, Similarity, gather_embedding


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

    def forward(self, image: Features, text: Features, world: World = World(), tile: int | None = None) -> Similarity:
        """Features of the b local pairs -> similarities to the global batch of all ranks: embed, gather, score.

        tile: rows and columns of the tiles in which a vector head computes scores without a matrix; None: a matrix.
        """
        return self.similarity(self.embed_image(image), self.embed_text(text), world, tile)

    def similarity(
        self, image: EmbeddingKind, text: EmbeddingKind, world: World = World(), tile: int | None = None
    ) -> Similarity:
        """Local embeddings -> similarities to the global batch; arguments as for `forward`."""

        def gather(embedding: EmbeddingKind) -> EmbeddingKind:
            return gather_embedding(embedding, world, world.gather_dtype)

        all_texts = gather(text)
        first = world.rank * len(image)
        # Each rank scores its own images with all texts, once: the other direction is the same matrix, redistributed.
        image_to_text = self.score(image, all_texts)
        return Similarity(
            DenseScores(image_to_text, first),
            DenseScores(world.transpose(image_to_text), first),
            within_image=lambda: DenseScores(self.score(image, gather(image)), first),
            within_text=lambda: DenseScores(self.score(text, all_texts), first),
            world=world,
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
