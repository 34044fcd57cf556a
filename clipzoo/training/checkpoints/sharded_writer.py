"""Writing a sharded checkpoint with torch.distributed.checkpoint: every rank writes its part of the state.

    step_00001234/rank_00000.safetensors ...      the parts of the ranks
    step_00001234/manifest.json                   what they hold, with their digests
    step_00001234.json                            size and digest of the manifest: marks the checkpoint as complete

The folder has a temporary name until all its files are on the disk; the mark is written last. A tensor that all ranks
hold is written by one of them; ranks share this work evenly.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from clipzoo import io
from clipzoo.io.weights import MANIFEST, mark_of
from clipzoo.training.checkpoints.manifest import Chunk, Manifest, StoredFile, StoredTensor, key_of
from clipzoo.training.checkpoints.pieces import Piece
from clipzoo.training.checkpoints.rotation import remove, remove_old, temporary_folder
from clipzoo.training.checkpoints.single_file import sha256
from clipzoo.training.checkpoints.tensor_files import write_tensors

# A single process saves without a process group, which torch warns about.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def save_sharded(
    path: Path,
    pieces: Mapping[str, Piece],
    state: Mapping[str, Any],
    facts: Mapping[str, Any],
    keep: int,
    rank: int,
    group: dist.ProcessGroup | None,
    written: Callable[[], None] = lambda: None,
) -> None:
    """Write the checkpoint <folder>/step_<step>, then remove older ones but the newest `keep`. Collective.

    pieces: this rank's parts of the tensors, on the CPU, by name. state: encoded state, of the first rank. facts: small
    values for the mark. group: process group of all ranks with a CPU backend; None for a single process. written:
    called when this rank's file is on the disk.

    Raises:
        WriteError: a file cannot be written, on this or another rank.
    """
    writer = _Writer(path, state, facts, keep, rank, written)
    try:
        dcp.save(pieces, storage_writer=writer, planner=_Planner(), process_group=group, no_dist=group is None)
    except dcp.CheckpointException as failure:
        errors = [error for error, _ in failure.failures.values()]
        for error in errors:
            if isinstance(error, io.WriteError):
                raise io.WriteError(f"{error}. Earlier checkpoints are untouched") from None
        raise errors[0] from None


class _Planner(dcp.DefaultSavePlanner):
    """Plans the pieces of this rank; the default planner then gives what several ranks hold to one of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        own = {name: piece for name, piece in self.state_dict.items() if not piece.place.is_empty_part}
        self.plan = SavePlan([_write_item(name, piece) for name, piece in own.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].local


def _write_item(name: str, piece: Piece) -> WriteItem:
    place = piece.place
    chunk = ChunkStorageMetadata(offsets=Size(place.offsets), sizes=Size(place.sizes))
    # All pieces have one type, because ranks may hold a tensor whole or in part.
    return WriteItem(
        index=MetadataIndex(name, place.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, TensorProperties(dtype=piece.local.dtype), Size(place.whole)),
    )


class _Writer(StorageWriter):
    """Writes one file for each rank, and the manifest in place of torch's pickled metadata."""

    def __init__(
        self, path: Path, state: Mapping[str, Any], facts: Mapping[str, Any], keep: int, rank: int,
        written: Callable[[], None],
    ) -> None:  # fmt: skip
        self._path, self._state, self._facts, self._keep = path, dict(state), facts, keep
        self._written = written
        self._temporary, self._file = temporary_folder(path), f"rank_{rank:05d}.safetensors"

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make an empty folder; on the first rank, before any rank writes."""
        with io.explained(self._path):
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary.mkdir(parents=True)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the file of this rank."""
        result: Future[list[WriteResult]] = Future()
        tensors: dict[str, Tensor] = {}
        for item in plan.items:
            assert item.index.offset is not None
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            tensors[key_of(item.index.fqn, item.index.offset)] = tensor
        file = write_tensors(self._temporary / self._file, tensors) if tensors else None
        self._written()
        result.set_result([
            WriteResult(item.index, 0, (self._file, file, tuple(tensor.shape)))
            for item, tensor in zip(plan.items, tensors.values(), strict=True)
        ])  # fmt: skip
        return result

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, give the folder its name, and write the mark; on the first rank."""
        files: dict[str, StoredFile] = {}
        chunks: dict[str, list[Chunk]] = defaultdict(list)
        for result in (result for rank in results for result in rank):
            file, files[file], sizes = result.storage_data
            assert result.index.offset is not None
            chunks[result.index.fqn].append(Chunk(tuple(result.index.offset), sizes, file))
        stored = {name: _stored(metadata.state_dict_metadata[name], parts) for name, parts in chunks.items()}
        content = self._temporary / MANIFEST
        io.write_whole(content, Manifest(self._state, stored, files).text())
        mark = {**self._facts, "bytes": content.stat().st_size, "sha256": sha256(content)}
        with io.explained(self._path):
            remove(self._path)
        io.publish_folder(self._temporary, self._path)
        io.write_json(mark_of(self._path), mark)
        remove_old(self._path, self._keep)


def _stored(facts: Any, chunks: list[Chunk]) -> StoredTensor:
    assert isinstance(facts, TensorStorageMetadata)
    return StoredTensor(str(facts.properties.dtype).removeprefix("torch."), tuple(facts.size), tuple(chunks))
