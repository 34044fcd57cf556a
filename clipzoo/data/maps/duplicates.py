"""Near-duplicates among images: JPEG quality, size, and crops that keep about 95 % of each side change little.

The low frequencies of an image and of windows at its corners and centre are compared with those of whole images.
Hash tables of their signs find candidates without comparing all pairs; cosine and mean colour decide.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from clipzoo.data.maps.samples import GRID

if TYPE_CHECKING:
    import pyarrow as pa

Window = tuple[float, float, float]
"""Top and left edge of a part of an image, and its height and width, in shares of the sides."""
WHOLE: Window = (0.0, 0.0, 1.0)
WINDOWS: tuple[Window, ...] = (
    WHOLE,
    *((top, left, side) for side in (0.97, 0.93) for top in (0.0, 1 - side) for left in (0.0, 1 - side)),
    *(((1 - side) / 2, (1 - side) / 2, side) for side in (0.97, 0.93)),
)
LEAST_COSINE = 0.87
"""Cosine of the low frequencies above which two images are near-duplicates, if their colours agree."""
MOST_COLOUR = 20
"""Largest difference of the mean red, green or blue, of 255."""
_MOST_SIGNS = 16
"""Different signs, of 64, above which two images are not compared."""
_TABLES, _LARGEST_BUCKET = 40, 100
"""Hash tables, and images of a bucket that are compared with another one: a bound of time and memory."""
_BLOCK = 2**17


class Signatures(NamedTuple):
    """Small pictures of n images. grey: uint8 [n, GRID, GRID]. colour: uint8 [n, 3]."""

    grey: np.ndarray
    colour: np.ndarray

    @classmethod
    def of(cls, table: pa.Table) -> Signatures:
        """Return the columns `grey` and `colour` of `image_facts`, which have no null."""
        grey, colour = (
            np.frombuffer(table[name].combine_chunks().buffers()[1], np.uint8) for name in ("grey", "colour")
        )
        return cls(grey.reshape(-1, GRID, GRID), colour.reshape(-1, 3))


def near_pairs(first: Signatures, second: Signatures) -> np.ndarray:
    """Return the pairs of near-duplicates, rows of `first` and of `second`, [m, 2] in their order.

    Windows of the images of `first` are compared with whole images of `second`: exchange both for the other crops.
    """
    whole, n = _coefficients(second.grey, WHOLE), max(len(second.grey), 1)
    signs, tables, random = whole > 0, [], np.random.default_rng(0)
    hashes, powers = np.packbits(signs, axis=1), 1 << np.arange(max(16, n.bit_length()))
    for _ in range(_TABLES):
        chosen = random.choice(64, len(powers), replace=False)
        keys = signs.take(chosen, axis=1) @ powers
        order = np.argsort(keys, kind="stable")
        tables.append((chosen, order, np.searchsorted(keys[order], np.arange(2 * powers[-1] + 1))))
    pairs = [np.empty(0, np.int64)]
    for start in range(0, len(first.grey), _BLOCK):
        for window in WINDOWS:
            coefficients = _coefficients(first.grey[start : start + _BLOCK], window)
            signs, candidates = coefficients > 0, list[np.ndarray]()
            window_hashes = np.packbits(signs, axis=1)
            for chosen, order, starts in tables:
                # Every row with the rows in its bucket.
                keys = signs.take(chosen, axis=1) @ powers
                counts = np.minimum(starts[keys + 1] - starts[keys], _LARGEST_BUCKET)
                rows = np.repeat(np.arange(len(keys)), counts)
                columns = order[np.arange(len(rows)) + np.repeat(starts[keys] - np.cumsum(counts) + counts, counts)]
                different = np.bitwise_count((window_hashes[rows] ^ hashes[columns]).view(np.uint64)).ravel()
                candidates.append((rows * n + columns)[different <= _MOST_SIGNS])
            rows, columns = np.divmod(np.unique(np.concatenate(candidates)), n)
            is_near = np.einsum("nf,nf->n", coefficients[rows], whole[columns]) >= LEAST_COSINE
            rows, columns = start + rows[is_near], columns[is_near]
            difference = np.abs(first.colour[rows].astype(int) - second.colour[columns]).max(axis=1)
            pairs.append((rows * n + columns)[difference <= MOST_COLOUR])
    return np.stack(np.divmod(np.unique(np.concatenate(pairs)), n), axis=1)


def earlier_copies(digests: np.ndarray, images: Signatures) -> tuple[np.ndarray, np.ndarray]:
    """Return for each image the first one with the same bytes, and the first one that it is a copy of, [n] each.

    digests: uint64 [n]. An image that equals no earlier one, and is near to no earlier one that is kept, is kept: it is
    its own first one.
    """
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
    equal = first[inverse]
    distinct = np.flatnonzero(equal == np.arange(len(equal)))
    pictures, kept = Signatures(images.grey[distinct], images.colour[distinct]), np.arange(len(distinct))
    pairs = np.sort(near_pairs(pictures, pictures), axis=1)
    # In the order of the later image: all earlier images are decided.
    for earlier, later in pairs[np.lexsort(pairs.T)].tolist():
        if kept[earlier] == earlier and kept[later] == later:
            kept[later] = earlier
    copied = equal.copy()
    copied[distinct] = distinct[kept]
    return equal, copied[equal]


def _coefficients(grey: np.ndarray, window: Window) -> np.ndarray:
    """Return the 64 lowest frequencies of a part of images, weighted by frequency, as unit vectors, [n, 64].

    grey: uint8 [n, GRID, GRID]. Amplitudes of photographs fall with the frequency: the weights make them comparable.
    """
    top, left, side = window
    frequencies = np.stack(np.divmod(np.arange((GRID // 2) ** 2), GRID // 2))
    order = np.argsort(frequencies.sum(axis=0) + 0.01 * abs(frequencies[0] - frequencies[1]), kind="stable")[1:65]
    squares = _cosines(top, side) @ grey.astype(np.float32) @ _cosines(left, side).T
    values = squares.reshape(len(grey), (GRID // 2) ** 2).take(order, axis=1)
    values *= np.hypot(*frequencies[:, order]).astype(np.float32)
    return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-3)


@cache
def _cosines(start: float, side: float) -> np.ndarray:
    """Return cosines on a part of GRID pixels, [frequencies, GRID]; all but the first have the mean 0."""
    edges = np.arange(GRID + 1) / GRID
    inside = np.clip(np.minimum(edges[1:], start + side) - np.maximum(edges[:-1], start), 0, None) * GRID
    centres = np.clip((edges[1:] + edges[:-1]) / 2, start, start + side) - start
    cosines = np.cos(np.pi * np.arange(GRID // 2)[:, None] * centres / side) * inside
    cosines[1:] -= cosines[1:].sum(axis=1, keepdims=True) * inside / inside.sum()
    return cosines.astype(np.float32)
