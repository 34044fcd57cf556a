"""data.locality=node: every node reads its part of the shards, and batches, gradients and resumes stay the same."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from clipzoo.data.faults import BadSampleError
from clipzoo.data.index import load_or_build
from clipzoo.data.locations import ShardCache
from clipzoo.data.plan import Nodes
from clipzoo.data.reader import ShardReader
from clipzoo.distributed.world import World
from clipzoo.encoders.base import Encoder
from clipzoo.errors import ConfigError
from clipzoo.heads.vector import ClipHead
from clipzoo.model import Model
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.training.gradients import GradientCache
from clipzoo.types import Batch, Features, Progress
from tests.support import runs
from tests.support.range_server import CLIENT, RangeServer, range_server
from tests.support.ranks import run_ranks
from tests.support.shards import batches_of, numbered, opened, shard_data, write_numbered, write_shard

COUNTS = (90, 110, 1, 0, 99, 100, 80)
N, STEPS = 96, 10  # the first epoch of 480 samples ends after step 5


# The assignment of rows.


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 128])
def test_every_sample_of_a_shard_is_in_the_segment_of_its_owner_and_of_no_other_node(nodes):
    for shard, samples in enumerate((1, 7, 127, 1000)):
        positions = np.arange(samples)
        owners = Nodes(range(nodes), 0).owners(np.full(samples, shard), positions, np.full(samples, samples))
        for node in range(nodes):
            first, end = Nodes(range(nodes), node).segment(shard, samples)
            assert positions[owners == node].tolist() == list(range(first, end))
            assert end - first in (samples // nodes, -(-samples // nodes))


def rows_of_all_ranks(of_ranks: tuple[int, ...], owners: np.ndarray) -> list[list[int]]:
    return [Nodes(of_ranks, rank).rows(owners).tolist() for rank in range(len(of_ranks))]


@pytest.mark.parametrize("of_ranks", [(0,) * 4, (0, 1, 2, 3), (0, 0, 1, 1), (0, 0, 0, 1, 2, 2), (0, 1, 0, 1)])
def test_every_rank_gets_exactly_b_rows_and_owners_keep_as_many_as_their_ranks_can_take(of_ranks):
    ranks, nodes = len(of_ranks), max(of_ranks) + 1
    generator = np.random.default_rng(0)
    for shares in ([1 / nodes] * nodes, [1.0] + [0.0] * (nodes - 1)):
        owners = generator.choice(nodes, 5 * ranks, p=shares)
        rows = rows_of_all_ranks(of_ranks, owners)
        assert [len(part) for part in rows] == [5] * ranks
        assert sorted(row for part in rows for row in part) == list(range(5 * ranks))
        for node in range(nodes):
            held = [row for rank, part in enumerate(rows) if of_ranks[rank] == node for row in part]
            own = np.flatnonzero(owners == node)
            assert np.isin(own, held).sum() == min(len(own), 5 * of_ranks.count(node))


def test_ranks_of_one_node_have_consecutive_rows_as_without_locality():
    assert rows_of_all_ranks((0, 0, 0), np.zeros(12, dtype=np.int64)) == [[*range(r * 4, r * 4 + 4)] for r in range(3)]


# Real nodes: forked gloo processes with a cache each, and a server that counts their bytes.


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[RangeServer]:
    """Seven shards of 480 samples behind a server, with the index of their URLs; one image is broken."""
    pytest.importorskip("aiohttp", reason="pip install aiohttp")
    folder = write_numbered(tmp_path_factory.mktemp("served"), COUNTS)
    broken = [(key, {**members, "png": b"broken"} if key == "000017" else members) for key, members in numbered(0, 90)]
    write_shard(folder / "00000.tar", broken)
    with range_server(folder) as server:
        opened(f"{server.address}/{{00000..00006}}.tar", folder / "run", **settings(folder, folder / "cache"))
        yield server


def settings(folder: Path, node: object) -> dict[str, Any]:
    return {
        "index_folder": str(folder / "index"),
        "cache_folder": str(folder / f"cache{node}"),
        "max_bad_fraction": 0.5,
    }


def read_on_rank(address: str, folder: Path, caches: Path, per_node: int, start: int) -> tuple[tuple[Any, ...], ...]:
    """Return for both settings the ids, images and texts [steps, b, ...] of this rank, its counters, and gradients.

    Each node is a client of the server, with a cache of its own.
    """
    node = int(os.environ["RANK"]) // per_node
    os.environ["GROUP_RANK"] = str(node)
    world, results = World.from_process_group(), []
    for locality in ("none", "node"):
        fsspec.config.conf["http"] = {"client_kwargs": {"headers": {CLIENT: f"{locality}{node}"}}}
        own = settings(folder, caches / f"{locality}{node}") | {"locality": locality, "workers": 1}
        data = shard_data(f"{address}/{{00000..00006}}.tar", **own)
        data.open(folder / "run", world)
        batches = list(batches_of(data, STEPS, N, world=world, start_step=start))
        parts = [torch.stack([getattr(batch, part) for batch in batches]) for part in ("sample_id", "image", "text")]
        gradients = gradients_of(batches[0], world)
        results.append((*parts, data.counters().get("undecodable_image", 0), gradients, data.fingerprint))
    return tuple(results)


class Linear(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.image_width, self.text_width = 6, 5
        self.image_layer, self.text_layer = nn.Linear(192, 6), nn.Embedding(500, 5)

    def image(self, image: Tensor) -> Features:
        return Features(self.image_layer(image.flatten(1) / 255).tanh())

    def text(self, text: Tensor) -> Features:
        return Features(self.text_layer(text).mean(dim=1))


def gradients_of(batch: Batch, world: World) -> list[Tensor]:
    """Return the loss and the gradients of a batch in float64, averaged over ranks."""
    torch.manual_seed(0)
    head = ClipHead(6, 5, 4, temperature=0.1, max_scale=100.0, learnable_temperature=True)
    model = Model(Linear(), head).double()
    batch = Batch(batch.image.double(), batch.text, batch.sample_id)
    loss = GradientCache(model, InfoNCE(0.5, 0.5), world, None)(batch, Progress(0, 10, 480, N))
    return [world.mean(value) for value in (loss.total, *(parameter.grad for parameter in model.parameters()))]


def joined(ranks: Sequence[tuple[Any, ...]]) -> list[Tensor]:
    """Return ids, images and texts [steps, N, ...] of all ranks, every step in the order of its sample ids."""
    parts = [torch.cat([rank[part] for rank in ranks], dim=1) for part in range(3)]
    order = parts[0].argsort(dim=1)
    return [torch.stack([step[row] for step, row in zip(part, order, strict=True)]) for part in parts]


@pytest.mark.medium
@pytest.mark.parametrize(("ranks", "per_node"), [(2, 1), (4, 1), (4, 2)])
def test_nodes_read_their_share_of_the_bytes_and_batches_and_gradients_are_the_same(served, tmp_path, ranks, per_node):
    folder, nodes = served.folder, ranks // per_node
    dataset = sum((folder / f"{shard:05d}.tar").stat().st_size for shard in range(len(COUNTS)))
    whole, divided = zip(*run_ranks(ranks, read_on_rank, served.address, folder, tmp_path, per_node, 0), strict=True)
    for actual, expected in zip(joined(divided), joined(whole), strict=True):
        assert torch.equal(actual, expected)
    assert all(rank[0].shape == (STEPS, N // ranks) for rank in divided)
    # The broken sample and its replacement are counted alike.
    assert [sum(rank[3] for rank in ranks) for ranks in (whole, divided)] == [2, 2]
    for rank in divided:
        assert rank[5] == whole[0][5]
        for actual, expected in zip(rank[4], whole[0][4], strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)
    # Two epochs: the segments stay in the cache, and single samples are read twice.
    for node in range(nodes):
        assert served.sent[f"none{node}"] >= dataset
        assert served.sent[f"node{node}"] <= dataset / nodes * (1 + 2 * 0.15)
    served.sent.clear()


@pytest.mark.medium
def test_a_run_resumed_on_other_nodes_continues_with_the_same_batches(served, tmp_path):
    whole, divided = zip(*run_ranks(3, read_on_rank, served.address, served.folder, tmp_path, 1, 4), strict=True)
    expected = joined([part for (part, _) in run_ranks(1, read_on_rank, served.address, served.folder, tmp_path, 1, 0)])
    for actual, reference in zip(joined(divided), expected, strict=True):
        assert torch.equal(actual, reference[4:])


# Faults.


@pytest.fixture
def bucket(tmp_path) -> Iterator[Path]:
    """Two shards in fsspec's memory file system."""
    files = fsspec.filesystem("memory")
    for path in write_numbered(tmp_path / "local", (6, 7)).glob("*.tar"):
        files.pipe(f"/bucket/{path.name}", path.read_bytes())
    yield tmp_path
    files.rm("/bucket", recursive=True)


@pytest.mark.parametrize("damage", ["missing", "changed", "cut before the index", "cut after the index"])
def test_a_damaged_shard_has_the_same_faults_in_parts_as_whole(bucket, damage):
    files, cut = fsspec.filesystem("memory"), (bucket / "local" / "00001.tar").read_bytes()[:9000]
    urls = [f"memory://bucket/{shard:05d}.tar" for shard in range(2)]
    if damage == "cut before the index":
        load_or_build(urls, ShardCache(str(bucket / "first"), 1.0), [bucket / "index"])
        files.pipe("/bucket/00001.tar", cut)
    index = load_or_build(urls, ShardCache(str(bucket / "index_cache"), 1.0), [bucket / "index"])
    if damage == "missing":
        files.rm("/bucket/00001.tar")
    elif damage != "cut before the index":
        files.pipe("/bucket/00001.tar", cut)
    kinds = []
    for number, nodes in enumerate((None, Nodes((0, 1), 0), Nodes((0, 1), 1))):
        reader, results = ShardReader(ShardCache(str(bucket / f"cache{number}"), 1.0), nodes=nodes), []
        reader.fetch((index, 1, position) for position in range(7))
        for position in range(7):
            try:
                results.append(reader.sample(index, 1, position).image())
            except BadSampleError as error:
                results.append(error.kind)
        kinds.append(results)
    assert kinds[0] == kinds[1] == kinds[2] and isinstance(kinds[0][-1], str)


def test_members_that_are_far_apart_are_requested_separately_and_read_like_the_whole_shard(tmp_path, monkeypatch):
    monkeypatch.setattr("clipzoo.data.reader._GAP_BYTES", 100)
    members = [(key, extension, content) for key, parts in numbered(0, 9) for extension, content in parts.items()]
    by_kind = sorted(members, key=lambda member: member[1])
    write_shard(tmp_path / "0.tar", [(key, {extension: content}) for key, extension, content in by_kind])
    url = f"file://{tmp_path}/0.tar"
    index = load_or_build([url], ShardCache(str(tmp_path / "cache"), 1.0), [tmp_path / "index"])
    whole = ShardReader(ShardCache(str(tmp_path / "cache"), 1.0))
    for node in range(3):
        parts = ShardReader(ShardCache(str(tmp_path / "cache"), 1.0), nodes=Nodes((0, 1, 2), node))
        for position in range(9):
            expected, actual = (reader.sample(index, 0, position) for reader in (whole, parts))
            assert actual.image() == expected.image() and actual.texts(None) == expected.texts(None)
            assert actual.value("caption") == f"number {position}"


def test_what_cannot_be_read_in_parts_is_an_error_with_the_key_to_change(tmp_path):
    for changes, reason in (
        ({"shards": "pipe:cat 0.tar"}, "data.shards holds pipe:cat 0.tar: the output of a command has no parts"),
        ({"shards": None, "path": str(tmp_path / "pairs.csv")}, "reads parts of tars, not of data.path"),
    ):
        (tmp_path / "pairs.csv").write_text("image,caption\nx.png,text\n")
        with pytest.raises(ConfigError, match=f"data.locality=node.*{reason}.*set data.locality=none"):
            shard_data(**{"shards": None, **changes}, locality="node")


def test_a_server_without_ranges_is_named_with_the_key_to_change(tmp_path):
    pytest.importorskip("aiohttp", reason="pip install aiohttp")
    with range_server(write_numbered(tmp_path, [5]), has_ranges=False) as server:
        cache = ShardCache(str(tmp_path / "cache"), 1.0)
        index = load_or_build([f"{server.address}/00000.tar"], cache, [tmp_path / "index"])
        reader = ShardReader(cache, nodes=Nodes((0, 1), 0))
        for position in (0, 4):
            with pytest.raises(ConfigError, match="does not support ranges; set data.locality=none"):
                reader.sample(index, 0, position)


# A training.


@pytest.mark.slow
def test_a_run_may_turn_locality_on_when_it_resumes_and_stays_the_same_within_rounding(
    tiny_shards, undisturbed, tmp_path
):
    runs.train_and_kill(tiny_shards, tmp_path, 5)
    runs.train(tiny_shards, tmp_path, "data.locality=node", ranks=2)
    losses = [
        [
            json.loads(line)["loss"]
            for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
            if "loss" in line
        ]
        for folder in (undisturbed, tmp_path)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-11)
