"""The images with the largest inner products: by faiss where it is installed, by blocks of products otherwise."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from clipzoo.evaluation.scoring import exact_products
from clipzoo.heads.base import Head
from clipzoo.types import Embedding

BLOCK = 256


class Candidates:
    """Images by the inner product of their factor with that of a caption; see `Head.search_factors`."""

    def __init__(self, head: Head, images: Embedding) -> None:
        self._head = head
        with torch.no_grad(), exact_products():
            self._basis = head.search_basis(images)
            blocks = torch.arange(len(images)).split(BLOCK)
            self._vectors = torch.cat([self._factors(images[block], images[:1])[0] for block in blocks])  # [n, f]
        self._faiss: Any = None
        if find_spec("faiss") is not None:
            import faiss

            self._faiss = faiss.IndexFlatIP(self._vectors.shape[1])
            self._faiss.add(self._vectors.numpy())

    def best(self, text: Embedding, count: int) -> Tensor:
        """Return the rows of the `count` best images of one caption, best first."""
        with torch.no_grad(), exact_products():
            query = self._factors(text[:0], text)[1]
            if self._faiss is not None:
                return torch.from_numpy(self._faiss.search(query.numpy(), count)[1][0])
            products = self._vectors @ query[0]
        return products.sort(descending=True, stable=True).indices[:count]

    def _factors(self, image: Embedding, text: Embedding) -> tuple[Tensor, Tensor]:
        left, right = self._head.search_factors(image, text, self._basis)
        return left.float(), right.float()
