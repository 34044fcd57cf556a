"""Positives, negatives and left-out pairs of a batch in which samples have several captions, or share captions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from clipzoo.errors import ConfigError
from clipzoo.types import Batch, EmbeddingKind, SameCaption, Views, World, gather_embedding, map_embedding


@dataclass(frozen=True)
class Scope:
    """How local samples are compared with the global batch.

    world: the ranks whose samples are compared.
    tile: rows and columns of the tiles in which a vector head computes scores without a matrix; None: a matrix.
    views: images and texts of a sample.
    pairing: positives and left-out pairs of the local images with all ranks' captions; None: a sample's own captions
    are its positives.
    """

    world: World = World()
    tile: int | None = None
    views: Views = Views()
    pairing: Pairing | None = None

    def gather(self, embedding: EmbeddingKind) -> EmbeddingKind:
        """Gather the embeddings of all ranks in the precision of training, [b, ...] -> [N, ...]. Differentiable."""
        return gather_embedding(embedding, self.world, self.world.gather_dtype)


@dataclass(frozen=True)
class Pairing:
    """Positives and negatives among the pairs of r local rows and all ranks' c columns.

    A pair is a positive if the owners are equal, and a negative if the labels differ. The other pairs are left out of
    all sums. Equal owners imply equal labels, and every row has a positive. All tensors are int64, below 2^31.

    row_owner, row_label: [r]. column_owner, column_label: [c].
    all_rows: owners and labels of all ranks' rows, [2, N]; None: the local rows are all rows.
    anchors: the columns that are local rows of the transpose, [k]; None: the positives of local rows.
    samples: number of local samples; None: the number of rows.
    """

    row_owner: Tensor
    column_owner: Tensor
    row_label: Tensor
    column_label: Tensor
    all_rows: Tensor | None = None
    anchors: Tensor | None = None
    samples: int | None = None

    @cached_property
    def positives(self) -> tuple[Tensor, Tensor]:
        """Rows and columns of the positives, [P] each, ordered by row."""
        ordered, order = self.column_owner.sort(stable=True)
        count = self.positive_counts
        rows = torch.repeat_interleave(count)
        # Places of a row's positives among the sorted columns: first, first + 1, ...
        first, before = torch.searchsorted(ordered, self.row_owner), count.cumsum(0) - count
        places = torch.arange(len(rows), device=rows.device) + (first - before)[rows]
        return rows, order[places]

    @cached_property
    def positive_counts(self) -> Tensor:
        """Number of positives of each row, [r]."""
        return equal_counts(self.row_owner, self.column_owner)

    @cached_property
    def negative_counts(self) -> Tensor:
        """Number of negatives of each row, [r]."""
        return len(self.column_label) - equal_counts(self.row_label, self.column_label)

    def absent(self, exclude_positive: bool = False, rows: slice = slice(None)) -> Tensor:
        """Mask of the left-out pairs and, if excluded, of the positives, of some rows, [r, c]."""
        absent = self.row_label[rows, None] == self.column_label
        return absent if exclude_positive else absent.logical_and_(self.row_owner[rows, None] != self.column_owner)

    @cached_property
    def labels(self) -> tuple[Tensor, Tensor]:
        """Labels of rows and columns in int32, for the tiles."""
        return self.row_label.int(), self.column_label.int()

    @property
    def local_samples(self) -> int:
        return len(self.row_owner) if self.samples is None else self.samples

    @cached_property
    def transpose_rows(self) -> Tensor:
        """Columns that are local rows of the transpose, [k]."""
        if self.anchors is not None:
            return self.anchors
        return torch.isin(self.column_owner, self.row_owner).nonzero().flatten()

    @cached_property
    def transposed(self) -> Pairing:
        """The pairing of the other direction: rows are the local captions, columns all ranks' images."""
        rows = self.transpose_rows
        return self._with_images(self.column_owner[rows], self.column_label[rows])

    def of_crops(self, crops: int) -> Pairing:
        """Return the pairing of `crops` further images of each sample, as rows."""
        owner, label = (values.repeat_interleave(crops) for values in (self.row_owner, self.row_label))
        return replace(self, row_owner=owner, row_label=label, samples=self.local_samples)

    def of_boxes(self, boxes: int) -> Pairing:
        """Return the pairing of `boxes` captions of regions of each sample, as rows, with all ranks' images."""
        return self._with_images(*(values.repeat_interleave(boxes) for values in (self.row_owner, self.row_label)))

    def _with_images(self, owner: Tensor, label: Tensor) -> Pairing:
        all_owner, all_label = (self.row_owner, self.row_label) if self.all_rows is None else self.all_rows
        return Pairing(owner, all_owner, label, all_label, samples=self.local_samples)


def text_anchors(pairing: Pairing | None, world: World) -> Tensor | EllipsisType:
    """Return the index of the text anchors among the local texts: all texts except hard captions, [k]."""
    if pairing is None:
        return ...  # an alias; the gradient of x[:] is a copy
    return pairing.transpose_rows - world.rank * (len(pairing.column_owner) // world.size)


def equal_counts(rows: Tensor, columns: Tensor) -> Tensor:
    """[r] and [c] -> number of columns that are equal to each row, [r]."""
    ordered = columns.sort().values
    return torch.searchsorted(ordered, rows, right=True) - torch.searchsorted(ordered, rows)


def batch_pairing(batch: Batch, world: World, same_caption: SameCaption = "negative") -> Pairing | None:
    """Return the pairing of the local images with all ranks' captions; None: image i has only caption i as positive.

    same_caption: whether pairs of samples that share a caption or a group, directly or through other samples, are
    negatives, are left out ("ignore"), or are positives. Collective.

    Raises:
        ConfigError: samples may share captions, but the texts are not token ids and have no digests.
    """
    views = batch.views
    if same_caption == "negative":
        plain = views.captions + views.hard == 1
        return None if plain else samples_pairing(len(batch), views, world, batch.sample_id.device)
    digests = batch.caption_key if batch.caption_key is not None else token_digests(batch)
    keys = world.gather(digests.reshape(len(batch), -1)[:, : views.captions].contiguous())
    label = components(keys, None if batch.group is None else world.gather(batch.group))
    return samples_pairing(len(batch), views, world, label.device, label, shared=same_caption == "positive")


def samples_pairing(
    samples: int,
    views: Views,
    world: World,
    device: torch.device | None = None,
    label: Tensor | None = None,
    shared: bool = False,
) -> Pairing:
    """Return the pairing of the images of b local samples with all ranks' captions.

    label: [N] of all ranks' samples; None: all differ.
    shared: whether the captions of all samples with the same label are positives.
    """
    count, columns = samples * world.size, views.captions + views.hard
    owner = torch.arange(count, device=device)
    label = owner if label is None else label
    all_rows = torch.stack([label if shared else owner, label])
    # A hard negative caption has a number that no sample has.
    hard = torch.arange(count, count * (1 + views.hard), device=device).view(count, views.hard).expand(2, -1, -1)
    captions = all_rows[:, :, None].expand(-1, -1, views.captions)
    column_owner, column_label = torch.cat([captions, hard], dim=2).flatten(1)
    local = slice(world.rank * samples, (world.rank + 1) * samples)
    row_owner, row_label = all_rows[:, local]
    places = torch.arange(count * columns, device=device).view(count, columns)[local, : views.captions]
    return Pairing(row_owner, column_owner, row_label, column_label, all_rows, places.flatten())


def token_digests(batch: Batch) -> Tensor:
    """Return digests of the token ids, [b * K] int64, which do not depend on padding."""
    tokens = batch.texts
    if tokens.is_floating_point():
        raise ConfigError(
            "objective.same_caption compares captions, and the texts of this dataset (data._target_) are not token "
            "ids: give objective.same_caption=negative"
        )
    if batch.text_lengths is not None:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        tokens = tokens.where(places < batch.text_lengths.to(tokens.device)[:, None], 0)
    factors = torch.randint(-(2**62), 2**62, (tokens.shape[1],), generator=torch.Generator().manual_seed(0))
    return (tokens.long() * factors.to(tokens.device)).sum(dim=1)


def components(keys: Tensor, group: Tensor | None = None) -> Tensor:
    """Return the first sample that is joined to each of N samples by equal keys or groups, directly or not, [N].

    keys: [N, k]; samples with an equal key in any column are joined. group: [N].
    """
    label = torch.arange(len(keys), device=keys.device)
    place = keys.unique(return_inverse=True)[1]  # [N, k], numbers of distinct keys
    if group is not None:
        place = torch.cat([place, group.unique(return_inverse=True)[1][:, None] + place.numel()], dim=1)
    while True:
        samples = label[:, None].expand_as(place).flatten()
        smallest = label.new_full((place.numel() + len(keys),), len(keys))
        smallest = smallest.scatter_reduce(0, place.flatten(), samples, "amin")
        joined = smallest[place].amin(dim=1)
        joined = joined[joined]  # a sample that is joined to its label takes over the label's label
        if torch.equal(joined, label):
            return label
        label = joined


def split_views(images: Any, texts: Any, views: Views) -> tuple[Any, Any, Any, Any]:
    """Embeddings of all local images and texts -> plain images, crops, captions with hard captions, boxes.

    Results are [b, n, ...] with n views of a sample, which may be 0.
    """
    images = map_embedding(lambda rows: rows.unflatten(0, (-1, views.images)), images)
    texts = map_embedding(lambda rows: rows.unflatten(0, (-1, views.texts)), texts)
    columns = views.captions + views.hard
    return images[:, :1], images[:, 1:], texts[:, :columns], texts[:, columns:]


# Sums over the positives of each row, and of sums over ranks.


def log_add(values: Tensor, dim: int) -> Tensor:
    """Log-sum-exp that is -inf with a zero gradient if all values are -inf."""
    empty = (values == -torch.inf).all(dim=dim, keepdim=True)
    return values.masked_fill(empty, 0.0).logsumexp(dim=dim).masked_fill(empty.squeeze(dim), -torch.inf)


def sums(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """[P] values and their rows -> sums, [count]."""
    return values.new_zeros(count).index_add(0, rows, values)


def log_sums(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """[P] values and their rows -> log sum exp, [count]; -inf without values."""
    largest = values.new_full((count,), -torch.inf).scatter_reduce(0, rows, values.detach(), "amax")
    largest = largest.clamp(min=torch.finfo(values.dtype).min)
    return sums((values - largest[rows]).exp(), rows, count).log() + largest
