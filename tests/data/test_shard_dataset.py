"""Batches of shards: exactly once an epoch, the same for any number of ranks and workers, resumable."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from clipzoo.data.tokenizer import caption_lengths
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from tests.support.processes import context, wait_until_gone
from tests.support.shards import NumberTokenizer, batches_of, opened, shard_data, write_numbered

COUNTS = [7, 1, 12, 5, 9, 6]
n = sum(COUNTS)
N = 12
STEPS = 2 * n // N + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_numbered(tmp_path_factory.mktemp("shards"), COUNTS)


def batches(folder, *, rank=0, ranks=1, start=0, stop=STEPS, trim=True, seed=3, **changes):
    order = {"seed": seed, "world": World(rank, ranks), "start_step": start, "trim_text": trim}
    return batches_of(opened(folder, **changes), stop, N, **order)


def read(folder, **arguments):
    """Return (sample ids [steps, b], images [steps, b, 3, S, S], texts [steps, b, L]) of one rank."""
    rows = list(batches(folder, **arguments))
    return tuple(torch.stack([getattr(batch, name) for batch in rows]) for name in ("sample_id", "image", "text"))


def _every_combination(folder, rank, results):
    """Read the part of `rank` for up to 4 ranks with 0, 1 and 2 workers; one of four processes."""
    torch.set_num_threads(1)
    parts = {}
    for ranks in range(rank + 1, 5):
        for workers in (0, 1, 2):
            views = read(folder, rank=rank, ranks=ranks, workers=workers, flip=0.5)
            parts[ranks, workers] = [view.numpy() for view in views]
    results.put((rank, parts))


@pytest.mark.medium
def test_epochs_are_exact_and_bit_identical_for_1_to_4_ranks_with_0_to_2_workers(folder):
    results = context.Queue()
    processes = [context.Process(target=_every_combination, args=(folder, rank, results)) for rank in range(4)]
    for process in processes:
        process.start()
    parts = dict(results.get(timeout=250) for _ in processes)
    for process in processes:
        process.join()
    expected = None
    for ranks, workers in parts[0]:
        ranked = zip(*(parts[rank][ranks, workers] for rank in range(ranks)), strict=True)
        joined = [torch.from_numpy(np.concatenate(views, 1)) for views in ranked]
        expected = expected or joined
        assert all(map(torch.equal, joined, expected)), (ranks, workers)
    ids, images, texts = expected
    stream = ids.flatten()
    for epoch in range(2):
        assert sorted(stream[epoch * n : (epoch + 1) * n].tolist()) == list(range(n))
    assert images.shape == (STEPS, N, 3, 8, 8) and images.dtype == torch.uint8
    assert torch.equal(texts[..., 1] - 10, ids)


@pytest.mark.medium
@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_at_any_step_equals_an_uninterrupted_run(folder, workers):
    augmented = {"flip": 0.5, "rand_augment": [2, 7]}
    whole = read(folder, workers=0, **augmented)
    for start in range(0, STEPS, 1 if workers == 0 else 4):
        rest = read(folder, start=start, workers=workers, **augmented)
        assert all(torch.equal(actual, reference[start:]) for actual, reference in zip(rest, whole, strict=True))


def test_resuming_with_half_the_ranks_continues_the_same_order(folder):
    whole = [torch.cat(parts, 1) for parts in zip(*(read(folder, rank=r, ranks=4) for r in range(4)), strict=True)]
    halved = zip(*(read(folder, rank=r, ranks=2, start=3) for r in range(2)), strict=True)
    assert all(
        torch.equal(torch.cat(actual, 1), reference[3:]) for actual, reference in zip(halved, whole, strict=True)
    )


def test_augmentation_depends_on_epoch_and_seed_and_leaves_the_global_random_state(folder):
    state = torch.get_rng_state()
    ids, images, _ = read(folder)
    again = (ids[1:].flatten() == ids[0, 0]).nonzero()[0, 0]
    assert not torch.equal(images[1:].flatten(0, 1)[again], images[0, 0])
    assert not torch.equal(read(folder, seed=4, stop=1)[0], ids[:1])
    read(folder, flip=0.5, rand_augment=[2, 7])
    assert torch.equal(torch.get_rng_state(), state)


def test_fingerprints_of_different_datasets_and_orders_differ(folder, tmp_path):
    fingerprint = opened(folder).fingerprint
    assert opened(folder, workers=2, crop_scale=[0.9, 1.0]).fingerprint == fingerprint
    others = [
        opened(write_numbered(tmp_path / "other", [*COUNTS[:-1], 7])),
        opened(folder, shuffle_window=3),
        opened([{"path": str(folder), "weight": 2}]),
    ]
    assert len({fingerprint, *(data.fingerprint for data in others)}) == 4


SCRIPT = """
import os, sys
from pathlib import Path
from tests.support.shards import batches_of, opened

if __name__ == "__main__":
    batches = batches_of(opened(Path(sys.argv[1]), workers=2), 10**9, 4)
    first = next(batches)
    print(Path(f"/proc/self/task/{os.getpid()}/children").read_text(), flush=True)
"""


@pytest.mark.medium
@pytest.mark.parametrize(
    ("rest", "code"),
    [
        # The traceback refers to the iterator until the end.
        pytest.param("raise RuntimeError('in training')", 1, marks=pytest.mark.slow),
        pytest.param("sys.exit(3)", 3, marks=pytest.mark.slow),
        ("next(batches)", 0),
    ],
)
def test_workers_end_with_a_run_that_stops_early(folder, rest, code):
    command = [sys.executable, "-c", f"{SCRIPT}    {rest}", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == code and "killed by signal" not in done.stderr, done.stderr
    workers = [int(pid) for pid in done.stdout.split()]
    assert len(workers) == 2 and wait_until_gone(workers, 120)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("crop_scale", [0.9, 0.5]), ("crop_scale", [0.5]), ("rand_augment", [2]), ("flip", 1.5),
        ("max_bad_fraction", -0.1), ("shuffle_window", 0), ("workers", -1), ("prefetch", 0),
    ],
)  # fmt: skip
def test_invalid_arguments_are_errors(folder, key, value):
    with pytest.raises(ConfigError, match=f"ShardDataset: {key} must be"):
        shard_data(folder, **{key: value})
    with pytest.raises(ConfigError, match="trainer.global_batch 12 .* 5 ranks"):
        next(batches(folder, ranks=5))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.medium)])
def test_images_whose_features_are_stored_are_not_decoded(folder, workers):
    data = opened(folder, crop_scale=(1.0, 1.0), workers=workers)
    plain = list(batches_of(data, 4, 10))
    keys = torch.zeros(n, dtype=torch.int64)
    data.leave_out_images(lambda ids: keys[ids])
    for batch, expected in zip(batches_of(data, 4, 10), plain, strict=True):
        assert torch.equal(batch.image, expected.image) and expected.image_key is None
        keys[batch.sample_id] = batch.image_key
    assert (keys != 0).all() and len(keys.unique()) == n
    keys[5] = 0
    for batch, expected in zip(batches_of(data, 4, 10), plain, strict=True):
        left_out = batch.sample_id != 5
        assert not batch.image[left_out].any() and torch.equal(batch.image[~left_out], expected.image[~left_out])
        assert torch.equal(batch.text, expected.text)
        assert batch.image.untyped_storage().nbytes() == (1 if left_out.all() else batch.image.numel())


def test_trimmed_batches_are_as_long_as_the_longest_caption_and_have_the_lengths_of_captions(folder):
    for batch in batches(folder, workers=1):
        assert torch.equal(batch.text_length, caption_lengths(batch.text, NumberTokenizer.end_token))
        assert batch.text.shape[-1] == 8
    for batch in batches(folder, trim=False):
        assert batch.text_length is None and batch.text.shape[-1] == 16
