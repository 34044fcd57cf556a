"""Near-duplicates among images: JPEG quality, size, and crops that keep about 90 % of each side change little.

The low frequencies of an image and of windows at its corners and centre are compared with those of whole images.
Hash tables of their signs find candidates without comparing all pairs. Each candidate is aligned, and both small
pictures have to agree in all places.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from clipzoo.data.maps.samples import GRID

if TYPE_CHECKING:
    import pyarrow as pa

Window = tuple[float, float, float]
"""Top and left edge of a part of an image, and its height and width, in shares of the sides."""
WHOLE: Window = (0.0, 0.0, 1.0)
_PLACES = product((0.95, 0.9), (0, 0.5, 1), (0, 0.5, 1))
WINDOWS: tuple[Window, ...] = (WHOLE, *(((1 - side) * top, (1 - side) * left, side) for side, top, left in _PLACES))
LEAST_COSINE = 0.8
"""Cosine of the low frequencies above which a window and an image are aligned."""
MOST_DIFFERENCE, MOST_ERROR = 26.0, 0.3
"""Aligned copies differ by at most this in the mean of a cell of CELL x CELL pixels, of 255, in each channel; and the
root of their mean squared difference is at most this share of the standard deviation of their pixels."""
CELL = 3
_SMALLEST_SIDE = 0.87
_BLUR = 0.65
"""Standard deviation of the filter of both pictures, in pixels."""
_STEPS = 4
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)
_ZERO = 0.02
"""Frequency, of a unit vector of 64, that counts as positive: those of symmetric drawings are zero but for noise."""
_MOST_SIGNS = 16
"""Different signs, of 64, above which two images are not compared."""
_TABLES, _LARGEST_BUCKET = 40, 100
"""Hash tables, and images of a bucket that are compared with another one: a bound of time and memory."""
_BLOCK, _PAIRS = 2**14, 2**11


def pictures(table: pa.Table) -> np.ndarray:
    """Return the column `pixels` of `image_facts`, which has no null, uint8 [n, GRID, GRID, 3]."""
    return np.frombuffer(table["pixels"].combine_chunks().buffers()[1], np.uint8).reshape(-1, GRID, GRID, 3)


def near_pairs(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the pairs of near-duplicates, rows of `first` and of `second`, [m, 2] in their order.

    first, second: `pictures` [n, GRID, GRID, 3] each. Windows of the images of `first` are compared with whole images
    of `second`: exchange both for the other crops.
    """
    n = max(len(second), 1)
    blocks = [_coefficients(_grey(second[start : start + _BLOCK]), WHOLE) for start in range(0, n, _BLOCK)]
    whole, tables, random = np.concatenate(blocks), [], np.random.default_rng(0)
    signs, powers = whole > _ZERO, 1 << np.arange(max(16, n.bit_length()))
    hashes = np.packbits(signs, axis=1)
    for _ in range(_TABLES):
        chosen = random.choice(64, len(powers), replace=False)
        keys = signs.take(chosen, axis=1) @ powers
        order = np.argsort(keys, kind="stable")
        tables.append((chosen, order, np.searchsorted(keys[order], np.arange(2 * powers[-1] + 1))))
    found = [np.empty((0, 2), np.int64)]
    for start in range(0, len(first), _BLOCK):
        pairs, cosines, windows = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
        grey = _grey(first[start : start + _BLOCK])
        for number, window in enumerate(WINDOWS):
            coefficients = _coefficients(grey, window)
            signs, candidates = coefficients > _ZERO, list[np.ndarray]()
            window_hashes = np.packbits(signs, axis=1)
            for chosen, order, starts in tables:
                # Every row with the rows in its bucket.
                keys = signs.take(chosen, axis=1) @ powers
                counts = np.minimum(starts[keys + 1] - starts[keys], _LARGEST_BUCKET)
                rows = np.repeat(np.arange(len(keys)), counts)
                columns = order[np.arange(len(rows)) + np.repeat(starts[keys] - np.cumsum(counts) + counts, counts)]
                different = np.bitwise_count((window_hashes[rows] ^ hashes[columns]).view(np.uint64)).ravel()
                candidates.append((rows * n + columns)[different <= _MOST_SIGNS])
            candidate = np.sort(np.concatenate(candidates))
            candidate = candidate[np.diff(candidate, prepend=-1) > 0]
            rows, columns = np.divmod(candidate, n)
            cosine = np.einsum("nf,nf->n", coefficients[rows], whole[columns])
            is_near = (cosine >= LEAST_COSINE) & ((rows + start != columns) | (first is not second))
            pairs.append(candidate[is_near])
            cosines.append(cosine[is_near])
            windows.append(np.full(is_near.sum(), number))
        # The best window of each pair.
        order = np.lexsort((-np.concatenate(cosines), np.concatenate(pairs)))
        pair, best = np.unique(np.concatenate(pairs)[order], return_index=True)
        rows, columns = np.divmod(pair, n)
        starts_at = np.array(WINDOWS)[np.concatenate(windows)[order][best]]
        for part in range(0, len(pair), _PAIRS):
            block = slice(part, part + _PAIRS)
            row, column = start + rows[block], columns[block]
            is_copy = are_copies(first[row], second[column], starts_at[block])
            found.append(np.stack([row, column], axis=1)[is_copy])
    return np.concatenate(found)


def earlier_copies(digests: np.ndarray, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each image the first one with the same bytes, and the first one that it is a copy of, [n] each.

    digests: uint64 [n]. images: `pictures` [n, GRID, GRID, 3]. An image that equals no earlier one, and is near to no
    earlier one that is kept, is kept: it is its own first one.
    """
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
    equal = first[inverse]
    distinct = np.flatnonzero(equal == np.arange(len(equal)))
    kept, images = np.arange(len(distinct)), images[distinct]
    pairs = np.sort(near_pairs(images, images), axis=1)
    # In the order of the later image: all earlier images are decided.
    for earlier, later in pairs[np.lexsort(pairs.T)].tolist():
        if kept[earlier] == earlier and kept[later] == later:
            kept[later] = earlier
    copied = equal.copy()
    copied[distinct] = distinct[kept]
    return equal, copied[equal]


def are_copies(first: np.ndarray, second: np.ndarray, windows: np.ndarray) -> np.ndarray:
    """Return whether the images of `second` are parts of those of `first`, [m] bool.

    first, second: `pictures` [m, GRID, GRID, 3]. windows: where the parts are about, [m, 3]. Steps of Gauss and Newton
    minimize the squared difference of their brightness at GRID / 2 x GRID / 2 places, then all places are compared.
    Both images are blurred in the same way.
    """
    ranges, centres = windows[:, [[0, 2], [1, 2]]], (np.arange(GRID // 2, dtype=np.float32) + 0.5) * 2 / GRID
    whole, is_copy = np.array([[0.0, 1.0]]), np.zeros(len(first), bool)
    grey, target = _grey(first), _grey(second)
    kernel = _kernels(whole, GRID // 2)[0][0]
    target = kernel @ target @ kernel.T
    for _ in range(_STEPS):
        (rows, row_slopes), (columns, column_slopes) = (_kernels(ranges[:, axis], GRID // 2) for axis in (0, 1))
        part = grey @ columns.mT
        difference, down, right = target - rows @ part, row_slopes @ part, rows @ (grey @ column_slopes.mT)
        slopes = np.stack([down, down * centres[:, None], right, right * centres], axis=1).reshape(len(grey), 4, -1)
        difference -= difference.mean(axis=(1, 2), keepdims=True)
        curvature = slopes @ slopes.mT
        curvature += np.eye(4, dtype=np.float32) * (1e-3 * np.trace(curvature, axis1=1, axis2=2)[:, None, None] + 1e-3)
        steps = np.linalg.solve(curvature, slopes @ difference.reshape(len(grey), -1, 1))
        ranges = ranges + np.clip(steps.reshape(-1, 2, 2), -0.05, 0.05)
        ranges[..., 1] = np.clip(ranges[..., 1], _SMALLEST_SIDE, 1)
        ranges[..., 0] = np.clip(ranges[..., 0], 0, 1 - ranges[..., 1])
    # Most candidates are far from the limit.
    likely = np.flatnonzero((difference**2).mean(axis=(1, 2)) <= 4 * MOST_ERROR**2 * target.var(axis=(1, 2)))
    rows, columns = (_kernels(ranges[likely, axis], GRID)[0][:, None] for axis in (0, 1))
    part, other = (np.moveaxis(images[likely], 3, 1).astype(np.float32) for images in (first, second))
    kernel = _kernels(whole, GRID)[0][0]
    part, other = rows @ part @ columns.mT, kernel @ other @ kernel.T
    cells = (part - other).reshape(len(likely), 3, GRID // CELL, CELL, GRID // CELL, CELL).mean(axis=(3, 5))
    variance = np.minimum(*(images.var(axis=(2, 3)).mean(axis=1) for images in (part, other)))
    is_small = ((part - other) ** 2).mean(axis=(1, 2, 3)) <= MOST_ERROR**2 * variance
    is_copy[likely[is_small & (np.abs(cells).max(axis=(1, 2, 3)) <= MOST_DIFFERENCE)]] = True
    return is_copy


def _kernels(ranges: np.ndarray, places: int) -> tuple[np.ndarray, np.ndarray]:
    """Return weights that blur and sample a part of GRID pixels, and their derivatives by its start, [m, places, GRID].

    ranges: start and length of the parts in shares, [m, 2].
    """
    centres = (ranges[:, :1] + ranges[:, 1:] * (np.arange(places) + 0.5) / places) * GRID - 0.5
    distances = (centres[..., None] - np.arange(GRID)).astype(np.float32)
    weights = np.exp(distances**2 * np.float32(-0.5 / _BLUR**2))
    weights /= weights.sum(axis=2, keepdims=True)
    slopes = weights * distances * np.float32(-GRID / _BLUR**2)
    return weights, slopes - weights * slopes.sum(axis=2, keepdims=True)


def _grey(images: np.ndarray) -> np.ndarray:
    return np.asarray(images.astype(np.float32) @ _LUMA)


def _coefficients(grey: np.ndarray, window: Window) -> np.ndarray:
    """Return the 64 lowest frequencies of a part of images, weighted by frequency, as unit vectors, [n, 64].

    grey: [n, GRID, GRID]. Amplitudes of photographs fall with the frequency: the weights make them comparable.
    """
    top, left, side = window
    frequencies = np.stack(np.divmod(np.arange((GRID // 2) ** 2), GRID // 2))
    order = np.argsort(frequencies.sum(axis=0) + 0.01 * abs(frequencies[0] - frequencies[1]), kind="stable")[1:65]
    squares = _cosines(top, side) @ grey @ _cosines(left, side).T
    values = squares.reshape(len(grey), (GRID // 2) ** 2).take(order, axis=1)
    values *= np.hypot(*frequencies[:, order]).astype(np.float32)
    # Images without structure are near to none.
    return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), GRID)


@cache
def _cosines(start: float, side: float) -> np.ndarray:
    """Return cosines on a part of GRID pixels, [frequencies, GRID]; all but the first have the mean 0."""
    edges = np.arange(GRID + 1) / GRID
    inside = np.clip(np.minimum(edges[1:], start + side) - np.maximum(edges[:-1], start), 0, None) * GRID
    centres = np.clip((edges[1:] + edges[:-1]) / 2, start, start + side) - start
    cosines = np.cos(np.pi * np.arange(GRID // 2)[:, None] * centres / side) * inside
    cosines[1:] -= cosines[1:].sum(axis=1, keepdims=True) * inside / inside.sum()
    return cosines.astype(np.float32)
