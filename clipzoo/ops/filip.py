"""Token-wise similarities of two sets of points: for each point the largest inner product with the other set (FILIP).

    image_to_text[a, c] = mean over a's points i of max over c's points j of x_i . y_j
    text_to_image[a, c] = mean over c's points j of max over a's points i of x_i . y_j

Inner products are in memory one tile at a time. The positions of the maxima are kept for the gradient, a byte each for
sets of up to 256 points; inner products are not computed again. The slow twin is `filip_scores_reference`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clipzoo.ops.tiles import Block, Layout, backend, product, tile_side, without_padding

GPU_TILE = 4096
"""Points of a tile's side for the gradient on a GPU, 64 MiB in float32."""


def filip_scores_reference(image: Tensor, image_mask: Tensor, text: Tensor, text_mask: Tensor) -> tuple[Tensor, Tensor]:
    """[n, M, d] with [n, M] bool, [k, L, d] with [k, L] -> image_to_text and text_to_image, [n, k] each."""
    cosines = torch.einsum("aid,cjd->acij", image, text)
    cosines = cosines.masked_fill(~(image_mask[:, None, :, None] & text_mask[:, None]), -torch.inf)
    means = []
    for best, mask in ((cosines.amax(3), image_mask[:, None]), (cosines.amax(2), text_mask)):
        total = best.where(mask & (best != -torch.inf), 0.0).sum(dim=2)
        means.append(total / mask.sum(dim=-1).clamp(min=1))
    return means[0], means[1]


def filip_scores(image: Tensor, image_mask: Tensor, text: Tensor, text_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Points [n, M, d] with their mask [n, M], points [k, L, d] with [k, L] -> image_to_text, text_to_image [n, k].

    Differentiable in the points; of equal maxima one has the gradient. A set without points scores 0. Half-precision
    points are scored in fp32.
    """
    image, text = (x.float() if x.dtype in (torch.float16, torch.bfloat16) else x for x in (image, text))
    if torch.compiler.is_exporting():
        return filip_scores_reference(image, image_mask, text, text_mask)
    images, texts = image_mask.sum(dim=1), text_mask.sum(dim=1)
    of_images, left = without_padding(image_mask, images.tolist(), image)
    of_texts, right = without_padding(text_mask, texts.tolist(), text)
    to_text, to_image = _Sums.apply(left, right, of_images, of_texts)
    empty = (images == 0)[:, None] | (texts == 0)
    scores = to_text / images[:, None].clamp(min=1), to_image / texts.clamp(min=1)
    return scores[0].masked_fill(empty, 0.0), scores[1].masked_fill(empty, 0.0)


def position_type(layout: Layout) -> torch.dtype:
    """Return the type of positions inside a set of points."""
    return torch.uint8 if max(layout.lengths, default=0) <= 256 else torch.int16


class _Sums(torch.autograd.Function):
    """Sums of the maxima; those of sets without points are undefined, and must have no gradient."""

    @staticmethod
    def forward(context: Any, left: Tensor, right: Tensor, of_images: Layout, of_texts: Layout) -> tuple[Tensor, ...]:
        kernels = backend("filip", left.device.type, left.dtype)
        sizes = len(of_images), len(of_texts)
        to_text, to_image = left.new_zeros(sizes), left.new_zeros(sizes)
        # Positions in the text [P, k] and in the image [n, Q].
        best_of_text = left.new_zeros((len(left), sizes[1]), dtype=position_type(of_texts))
        best_of_image = left.new_zeros((sizes[0], len(right)), dtype=position_type(of_images))
        kernels.filip_forward(left, right, of_images, of_texts, to_text, to_image, best_of_text, best_of_image)
        context.save_for_backward(left, right, best_of_text, best_of_image)
        context.layouts = of_images, of_texts
        return to_text, to_image

    @staticmethod
    @once_differentiable
    def backward(context: Any, to_text: Tensor, to_image: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of both sides: products with P, whose entry (i, j) is the gradient of x_i . y_j."""
        left, right, best_of_text, best_of_image = context.saved_tensors
        of_images, of_texts = context.layouts
        d_left, d_right = torch.zeros_like(left), right.new_zeros(right.shape[::-1])
        size = tile_side() if left.device.type == "cpu" else GPU_TILE
        column_blocks = list(of_texts.blocks(size))
        for rows in of_images.blocks(size):
            transposed = left[rows.points].mT.contiguous()
            for columns in column_blocks:
                pairs = rows.samples, columns.samples
                tile = left.new_zeros(len(rows.owner), len(columns.owner))
                position = best_of_text[rows.points, columns.samples].long() + columns.starts
                tile.scatter_add_(1, position, to_text[pairs].index_select(0, rows.owner))
                position = best_of_image[rows.samples, columns.points].long() + rows.starts[:, None]
                tile.scatter_add_(0, position, to_image[pairs].index_select(1, columns.owner))
                d_left[rows.points].add_(product(tile, right[columns.points].mT))
                d_right[:, columns.points].add_(product(transposed, tile.mT))
        return d_left, d_right.mT, None, None


# The maxima in tiles of torch operations, on CPUs.


def filip_forward(
    left: Tensor, right: Tensor, of_images: Layout, of_texts: Layout,
    to_text: Tensor, to_image: Tensor, best_of_text: Tensor, best_of_image: Tensor,
) -> None:  # fmt: skip
    """Packed points [P, d] of n images and [Q, d] of k texts -> the last four arguments, which are overwritten.

    to_text, to_image: sums over an image's points of the largest product with a text's points [n, k], and over a text's
    points of the largest with an image's [n, k]. best_of_text, best_of_image: positions of the maxima.
    """
    column_blocks = list(of_texts.blocks(tile_side()))
    for rows in of_images.blocks(tile_side()):
        for columns in column_blocks:
            tile = product(left[rows.points], right[columns.points])
            largest, position = _largest(tile.mT.contiguous(), columns, best_of_text.dtype)
            to_text[rows.samples, columns.samples] = _summed(largest, rows).mT
            best_of_text[rows.points, columns.samples] = position.mT
            largest, position = _largest(tile, rows, best_of_image.dtype)
            to_image[rows.samples, columns.samples] = _summed(largest, columns)
            best_of_image[rows.samples, columns.points] = position


def _largest(tile: Tensor, block: Block, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[p, q] -> the largest entry of each sample's rows [samples, q], and its position inside the sample."""
    if block.length:
        return _maximum(tile.unflatten(0, (block.count, block.length)), dtype)
    largest = tile.new_zeros(block.count, tile.shape[1])
    position = torch.zeros_like(largest, dtype=dtype)
    for sample, points in block.segments:
        largest[sample], position[sample] = _maximum(tile[points], dtype)
    return largest, position


def _maximum(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[..., L, q] -> maxima and their positions [..., q]; torch.max takes 1.7 times as long on a CPU."""
    largest = values.amax(dim=-2, keepdim=True)
    places = torch.arange(values.shape[-2], dtype=dtype, device=values.device)[:, None]
    return largest.squeeze(-2), (values == largest).view(torch.uint8).to(dtype).mul_(places).amax(dim=-2)


def _summed(largest: Tensor, block: Block) -> Tensor:
    """[s, p] -> sums over each sample's points, [s, samples]."""
    return largest.new_zeros(len(largest), block.count).index_add_(1, block.owner, largest)
