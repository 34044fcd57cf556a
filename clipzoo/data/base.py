"""Interface of datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from clipzoo.data.captions import CaptionCounts
from clipzoo.types import Batch, Views, World


class Dataset(Protocol):
    """Batches of samples in an order that is a pure function of seed, epoch and step.

    samples: number of samples n; known after `open`. views: numbers of images and texts of a sample.
    A subclass defines `samples`, `fingerprint`, `check` and `batches`, and overrides what else it has.
    """

    samples: int
    views: Views = Views()

    @property
    def fingerprint(self) -> str:
        """Digest of the samples and their order; a run resumes only with the same fingerprint."""

    @property
    def epoch_rows(self) -> int:
        """Rows of an epoch, the unit of lengths in epochs."""
        return self.samples

    @property
    def history(self) -> list[dict[str, Any]]:
        """The dataset at the start of the run and after each growth, as plain values with "samples" and "fingerprint".

        A checkpoint holds the history; a run resumes if it is that of the checkpoint, or begins with it.
        """
        return [{"samples": self.samples, "fingerprint": self.fingerprint}]

    def open(self, cache: Path | None, world: World) -> None:
        """Find the samples; an index may be written under `cache`, the run directory. Collective."""
        return None

    def check(self, seed: int, global_batch: int) -> None:
        """Raise ConfigError if the dataset cannot supply batches of this size without repeating a sample."""

    def batches(
        self, *, seed: int, global_batch: int, world: World, start_step: int, stop_step: int, trim_text: bool
    ) -> Iterator[Batch]:
        """Yield this rank's share of steps start_step .. stop_step - 1, on the CPU.

        trim_text: cut the padding that all captions of the batch share.
        """

    def captions(self) -> CaptionCounts:
        """Return how often captions repeat; empty if the samples have none. Must not read the samples."""
        return CaptionCounts()

    def counters(self) -> Mapping[str, int]:
        """Return the numbers of unusable or converted samples by kind, as seen by this rank since `open`."""
        return {}

    def examples(self, sample_ids: Sequence[int]) -> list[tuple[Tensor, str]]:
        """Return image (uint8 [3, S, S]) and caption of each sample; empty if the samples cannot be shown."""
        return []

    def names(self, sample_ids: Sequence[int]) -> list[str]:
        """Return shard and key of each sample, such as "00003.tar 000031415"; empty if the samples have no names."""
        return []

    def repeats(self, view: Literal["image", "text"]) -> bool:
        """Return True if a sample has one image or caption, the same in every epoch: its features can be cached."""
        return False

    def leave_out_images(self, stored_keys: Callable[[Tensor], Tensor]) -> None:
        """Do not decode images whose features are cached: they are black, and batches have `image_key`. stored_keys:
        called in loader processes, sample ids [b] -> digests of these images, [b] int64; 0 for other samples."""
        return None

    def shards(self) -> Sequence[tuple[str, str, int]]:
        """Return name, digest and number of samples of each shard in the order of sample ids; empty without shards."""
        return []
