"""From shards to batches: exactly once, one order for every number of ranks and workers, resumable."""

import torch

from tests.shards import shard_data, write_numbered

COUNTS = [7, 1, 12, 5, 9]
N = 4


def read(folder, *, ranks=1, workers=0, start=0, stop=17, **changes):
    """All ranks' batches, joined row by row: (ids [steps, N], images, texts)."""
    batches = []
    for rank in range(ranks):
        data = shard_data(folder, workers=workers, **changes)
        data.open(None)
        batches.append(
            list(
                data.batches(
                    seed=3,
                    global_batch=N,
                    rank=rank,
                    world_size=ranks,
                    start_step=start,
                    stop_step=stop,
                    trim_text=True,
                )
            )
        )
    return tuple(
        torch.stack([torch.cat([getattr(part, name) for part in parts]) for parts in zip(*batches, strict=True)])
        for name in ("sample_id", "image", "text")
    )


def test_every_epoch_holds_every_sample_once_and_captions_stay_with_their_ids(tmp_path):
    ids, images, texts = read(write_numbered(tmp_path / "s", COUNTS))
    assert images.shape == (17, N, 3, 8, 8) and images.dtype == torch.uint8
    stream = ids.flatten()
    n = sum(COUNTS)
    for epoch in range(2):
        assert sorted(stream[epoch * n : (epoch + 1) * n].tolist()) == list(range(n))
    assert torch.equal(texts[..., 1] - 10, ids)


def test_order_and_pixels_do_not_depend_on_ranks_or_workers(tmp_path):
    folder = write_numbered(tmp_path / "s", COUNTS)
    expected = read(folder)
    for ranks, workers in ((1, 1), (2, 2), (4, 0)):
        for one, other in zip(expected, read(folder, ranks=ranks, workers=workers), strict=True):
            assert torch.equal(one, other), (ranks, workers)
