"""Captions of similar length are encoded together, without the padding up to the longest caption of the batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from clipzoo.types import Features

QUANTUM = 4
"""Rows and width of a group are multiples of it, apart from the longest group: few shapes for torch.compile."""
CPU_OVERHEAD, GPU_OVERHEAD = 128, 8192
"""Tokens whose encoding takes as long as starting one more group: kernel launches dominate on a GPU."""


def encode_by_length(
    encode: Callable[[Tensor], Features], text: Tensor, lengths: Tensor | None, tokens: bool
) -> Features:
    """Token ids [b, L] -> features in the order of the batch, encoded in groups of similar length.

    Equal to `encode(text)` up to rounding for towers whose features do not depend on padding. The tokens of padding
    are zeros where their group has fewer than L positions, and False in the mask.

    lengths: [b] on the CPU, tokens of each caption up to its end token; None for one group, as for a batch whose
        padding counts. tokens: return tokens and mask too, if the tower has them.
    """
    groups = caption_groups(text, lengths)
    if lengths is None or len(groups) == 1:
        return encode(text)
    order = lengths.argsort(stable=True)
    sorted_text = text[order.to(text.device, non_blocking=True)]
    rows = [count for count, _ in groups]
    parts = [
        encode(part[:, :width].contiguous()) for part, (_, width) in zip(sorted_text.split(rows), groups, strict=True)
    ]
    inverse = order.argsort().to(text.device, non_blocking=True)
    pooled = torch.cat([part.pooled for part in parts]).index_select(0, inverse)
    if not tokens or parts[0].tokens is None:
        return Features(pooled)
    padded = [_padded(part, text.shape[1]) for part in parts]
    all_tokens, masks = (torch.cat(tensors).index_select(0, inverse) for tensors in zip(*padded, strict=True))
    return Features(pooled, all_tokens, masks)


def caption_groups(text: Tensor, lengths: Tensor | None) -> list[tuple[int, int]]:
    """Return rows and width of the groups in which `encode_by_length` encodes these captions, or any other view."""
    if lengths is None:
        return [(len(text), text.shape[-1])]
    overhead = CPU_OVERHEAD if text.device.type == "cpu" else GPU_OVERHEAD
    return group_shapes(sorted(lengths.tolist()), text.shape[1], overhead)


def group_shapes(lengths: Sequence[int], limit: int, overhead: int) -> list[tuple[int, int]]:
    """Return rows and width of the groups of captions, given their lengths in ascending order.

    The sum over the groups of rows times width plus `overhead` is the smallest possible. limit: largest width.
    """
    # The first `end` captions have at most `width` tokens; the rest of a quantum of rows joins the next group.
    widths = [*range(QUANTUM, limit, QUANTUM), limit]
    counts = [bisect_right(lengths, width) for width in widths]
    ends = [count if count == len(lengths) else count // QUANTUM * QUANTUM for count in counts]
    best: dict[int, tuple[int, list[tuple[int, int]]]] = {0: (0, [])}
    for end, width in zip(ends, widths, strict=True):
        if end not in best:
            costs = ((cost + (end - start) * width + overhead, start) for start, (cost, _) in best.items())
            cost, start = min(costs)
            best[end] = cost, [*best[start][1], (end - start, width)]
    return best[len(lengths)][1]


def _padded(features: Features, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and mask of a group, padded to `length` positions."""
    tokens, mask = features.tokens, features.mask
    assert tokens is not None
    if mask is None:
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    missing = length - tokens.shape[1]
    return functional.pad(tokens, (0, 0, 0, missing)), functional.pad(mask, (0, missing))
