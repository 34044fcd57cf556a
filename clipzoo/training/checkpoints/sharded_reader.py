"""Reading a sharded checkpoint with torch.distributed.checkpoint: every rank reads the parts that it needs.

The number of ranks may differ from that which wrote it. Nothing in the files is executed.
"""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from clipzoo import io
from clipzoo.training.checkpoints.manifest import Manifest, StoredTensor, decoded, key_of, read_manifest, tensor_paths
from clipzoo.training.checkpoints.pieces import Keys, Layout, Piece
from clipzoo.training.checkpoints.tensor_files import opened, read_slice

# Ranks read without collectives, which torch warns about.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def read_sharded(folder: Path, layout: Layout, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the state of a sharded checkpoint, on the CPU, with the parts of tensors that `layout` asks for.

    without: keys of the state that are not read.

    Raises:
        DamagedFileError: a file is missing or damaged.
    """
    manifest = read_manifest(folder).without(without)
    names = tensor_paths(manifest.state)
    pieces = {name: _empty(manifest.tensors[name], layout, path) for path, name in names.items()}
    try:
        dcp.load(dict(pieces), storage_reader=_Reader(folder, manifest), planner=_Planner(), no_dist=True)
    except dcp.CheckpointException as failure:
        raise next(iter(failure.failures.values()))[0] from None
    state: dict[str, Any] = decoded(manifest.state, lambda path, name: pieces[name].local)
    return state


def _empty(tensor: StoredTensor, layout: Layout, path: Keys) -> Piece:
    place = layout(path, tensor.shape)
    return Piece(torch.zeros(place.sizes, dtype=getattr(torch, tensor.dtype)), place)


class _Planner(dcp.DefaultLoadPlanner):
    """Plans the reading of pieces."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, piece in self.state_dict.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, stored, [_chunk(piece.place.offsets, piece.place.sizes)])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        tensor: Tensor = self.state_dict[index.fqn].local
        return tensor


class _Reader(StorageReader):
    """Reads slices of the files of all ranks."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True

    def read_metadata(self) -> Metadata:
        """Return the manifest in torch's terms."""
        facts: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        files: dict[MetadataIndex, str] = {}
        for name, tensor in self._manifest.tensors.items():
            properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
            chunks = [_chunk(chunk.offsets, chunk.sizes) for chunk in tensor.chunks]
            facts[name] = TensorStorageMetadata(properties, Size(tensor.shape), chunks)
            files |= {MetadataIndex(name, chunk.offsets): chunk.file for chunk in tensor.chunks}
        return Metadata(facts, storage_data=files)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._files = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._files[item.storage_index]].append(item)
        for name, items in by_file.items():
            with opened(io.below(self._folder, name)) as file:
                for item in items:
                    self._read(file, item, planner)
        read: Future[None] = Future()
        read.set_result(None)
        return read

    def _read(self, file: Any, item: ReadItem, planner: LoadPlanner) -> None:
        slices = tuple(
            slice(start, start + length) for start, length in zip(item.storage_offsets, item.lengths, strict=True)
        )
        assert item.storage_index.offset is not None
        target = planner.resolve_tensor(item)
        target.copy_(read_slice(file, key_of(item.storage_index.fqn, item.storage_index.offset), slices, target))
        planner.commit_tensor(item, target)


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=Size(offsets), sizes=Size(sizes))
