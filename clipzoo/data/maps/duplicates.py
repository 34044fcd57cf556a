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
_MOST_BITS = 16
_BITS = 64
_TABLES = 64
_LARGEST_BUCKET = 100
_BLOCK = 2**17
_ODD = np.uint64(0x9E3779B97F4A7C15)


class Signatures(NamedTuple):
    """Small pictures of n images. grey: uint8 [n, GRID, GRID]. colour: uint8 [n, 3]."""

    grey: np.ndarray
    colour: np.ndarray

    @classmethod
    def of(cls, table: pa.Table) -> Signatures:
        """Return the pictures in the columns `grey` and `colour` of `image_facts`, which have no null."""
        grey, colour = (
            np.frombuffer(table[name].combine_chunks().buffers()[1], np.uint8) for name in ("grey", "colour")
        )
        return cls(grey.reshape(-1, GRID, GRID), colour.reshape(-1, 3))


def near_pairs(first: Signatures, second: Signatures) -> np.ndarray:
    """Return the pairs of near-duplicates, rows of `first` and of `second`, [m, 2] in their order.

    Windows of the images of `first` are compared with whole images of `second`: exchange both for the other crops.
    """
    whole = np.concatenate([_coefficients(part, WHOLE) for part in _blocks(second.grey)] or [np.empty((0, _BITS))])
    hashes, n = _hashes(whole), len(whole)
    bits = max(16, n.bit_length())
    random, tables = np.random.default_rng(0), []
    for _ in range(_TABLES if n else 0):
        mask = np.bitwise_or.reduce(np.uint64(1) << random.choice(_BITS, bits, replace=False).astype(np.uint64))
        keys = _keys(hashes, mask, bits)
        order = np.argsort(keys, kind="stable")
        tables.append((mask, order, np.searchsorted(keys[order], np.arange(2**bits + 1))))

    pairs = [np.empty(0, np.int64)]
    for number, part in enumerate(_blocks(first.grey)):
        for window in WINDOWS:
            coefficients = _coefficients(part, window)
            window_hashes, candidates = _hashes(coefficients), [np.empty(0, np.int64)]
            for mask, order, starts in tables:
                keys = _keys(window_hashes, mask, bits)
                counts = np.minimum(starts[keys + 1] - starts[keys], _LARGEST_BUCKET)
                rows = np.repeat(np.arange(len(keys)), counts)
                places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
                columns = order[starts[keys][rows] + places]
                close = _popcount(window_hashes[rows] ^ hashes[columns]) <= _MOST_BITS
                candidates.append(rows[close] * n + columns[close])
            rows, columns = np.divmod(np.unique(np.concatenate(candidates)), max(n, 1))
            cosines = np.einsum("nf,nf->n", coefficients[rows], whole[columns])
            rows, columns = (values[cosines >= LEAST_COSINE] for values in (rows, columns))
            rows += number * _BLOCK
            difference = np.abs(first.colour[rows].astype(int) - second.colour[columns]).max(axis=1)
            pairs.append((rows * n + columns)[difference <= MOST_COLOUR])
    return np.stack(np.divmod(np.unique(np.concatenate(pairs)), max(n, 1)), axis=1)


def earlier_copies(digests: np.ndarray, images: Signatures) -> tuple[np.ndarray, np.ndarray]:
    """Return for each image the first one with the same bytes, and the first one that it is a copy of, [n] each.

    digests: uint64 [n]. An image that is equal to no earlier one and near to no earlier image that is kept is kept, and
    is its own first one.
    """
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
    equal = first[inverse]
    distinct = np.flatnonzero(equal == np.arange(len(equal)))
    pictures = Signatures(images.grey[distinct], images.colour[distinct])
    kept = np.arange(len(distinct))
    pairs = np.sort(near_pairs(pictures, pictures), axis=1)
    # In the order of the later image: all earlier images are decided.
    for earlier, later in pairs[np.lexsort(pairs.T)].tolist():
        if kept[earlier] == earlier and kept[later] == later:
            kept[later] = earlier
    copied = equal.copy()
    copied[distinct] = distinct[kept]
    return equal, copied[equal]


def _blocks(rows: np.ndarray) -> list[np.ndarray]:
    return [rows[start : start + _BLOCK] for start in range(0, len(rows), _BLOCK)]


def _coefficients(grey: np.ndarray, window: Window) -> np.ndarray:
    """Return the 64 lowest frequencies of a part of images, weighted by frequency, as unit vectors, [n, 64].

    grey: uint8 [n, GRID, GRID]. Amplitudes of photographs fall with the frequency: the weights make them comparable.
    """
    top, left, side = window
    rows, columns, (order, weights) = _basis(top, side), _basis(left, side), _lowest()
    values = (rows @ grey.astype(np.float32) @ columns.T).reshape(len(grey), -1)[:, order] * weights
    return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-3)


@cache
def _basis(start: float, side: float) -> np.ndarray:
    """Return cosines on a part of GRID pixels, [frequencies, GRID]; all but the first have the mean 0."""
    edges = np.arange(GRID + 1) / GRID
    inside = np.clip(np.minimum(edges[1:], start + side) - np.maximum(edges[:-1], start), 0, None) * GRID
    centres = np.clip((edges[1:] + edges[:-1]) / 2, start, start + side) - start
    cosines = np.cos(np.pi * np.arange(GRID // 2)[:, None] * centres / side) * inside
    cosines[1:] -= cosines[1:].sum(axis=1, keepdims=True) * inside / inside.sum()
    return cosines.astype(np.float32)


@cache
def _lowest() -> tuple[np.ndarray, np.ndarray]:
    """Return the places of the lowest frequencies but 0 in a square of them, and their weights, [64] each."""
    rows, columns = np.divmod(np.arange((GRID // 2) ** 2), GRID // 2)
    order = np.argsort(rows + columns + 0.01 * abs(rows - columns), kind="stable")[1 : _BITS + 1]
    return order, np.hypot(rows, columns)[order].astype(np.float32)


def _hashes(coefficients: np.ndarray) -> np.ndarray:
    """Return the signs of coefficients [n, 64] as bits, uint64 [n]."""
    return np.ascontiguousarray(np.packbits(coefficients > 0, axis=1)).view(np.uint64).ravel()


def _keys(hashes: np.ndarray, mask: np.uint64, bits: int) -> np.ndarray:
    """Return the buckets of hashes in a table: `bits` bits of a mix of the bits in `mask`, int64 [n]."""
    return ((hashes & mask) * _ODD >> np.uint64(64 - bits)).astype(np.int64)


def _popcount(values: np.ndarray) -> np.ndarray:
    """Return the number of bits of uint64 values."""
    values = values - (values >> np.uint64(1) & np.uint64(0x5555555555555555))
    values = (values & np.uint64(0x3333333333333333)) + (values >> np.uint64(2) & np.uint64(0x3333333333333333))
    values = values + (values >> np.uint64(4)) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return values * np.uint64(0x0101010101010101) >> np.uint64(56)
