"""Several captions, hard negatives, regions, further crops and groups of a sample."""

import json
import re
from io import BytesIO
from operator import itemgetter

import numpy as np
import pytest
import torch
from PIL import Image

from clipzoo.data.captions import digest
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.types import Views
from tests.support.shards import batches_of, opened, picture, write_shard

COUNT = 24


def members(number, **changes):
    """Return a sample with captions 100 i .. 100 i + 3, hard negatives 100 i + 50, ..., and regions 100 i + 70, ..."""
    facts = {
        "captions": [f"number {100 * number + place}" for place in range(4)],
        "short": f"number {100 * number + 10}",
        "hard": [f"number {100 * number + 50 + place}" for place in range(3)],
        "boxes": [[f"number {100 * number + 70 + place}", 0.5 * place, 0, 0.5 + 0.5 * place, 1] for place in range(2)],
        "group": number % 5,
    }
    facts = {key: value for key, value in (facts | changes).items() if value is not ...}
    text = f"number {100 * number + 90}"
    return {"png": picture(number), "txt": text.encode(), "json": json.dumps(facts).encode()}


def write(folder, changes=None):
    """Write three shards. changes: number of a sample -> its changed facts."""
    changes = changes or {}
    for shard in range(3):
        numbers = range(8 * shard, 8 * shard + 8)
        write_shard(folder / f"{shard}.tar", [(f"{i:06d}", members(i, **changes.get(i, {}))) for i in numbers])
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("views"))


EVERYTHING = {
    "views": Views(captions=3, hard=2, boxes=1, crops=2),
    "caption_key": "captions", "hard_key": "hard", "box_key": "boxes", "group_key": "group",
}  # fmt: skip


def epoch(folder, run=None, start=0, stop=2, world=World(), **changes):
    """Return the dataset and its batches of 12 samples."""
    data = opened(folder, run, **changes)
    return data, list(batches_of(data, stop, 12, start_step=start, world=world))


def numbers_of(batch):
    """Return the captions of a batch as numbers, [b, K], without the hundreds that are the sample's id."""
    return batch.text[..., 1] - 10 - 100 * batch.sample_id[:, None]


def equal(first, second):
    pairs = zip(vars(first).values(), vars(second).values(), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def test_a_batch_holds_captions_hard_negatives_and_regions_in_this_order(folder):
    data, batches = epoch(folder, **EVERYTHING)
    assert data.counters() == {}
    for batch in batches:
        assert batch.text.shape == (12, 6, 8) and batch.image.shape == (12, 3, 3, 8, 8)
        assert batch.text_length.shape == batch.caption_key.shape == (12, 6)
        assert batch.views == EVERYTHING["views"]
        numbers = numbers_of(batch)
        for columns, allowed in ((slice(0, 3), range(4)), (slice(3, 5), range(50, 53)), (slice(5, 6), (70, 71))):
            for row in numbers[:, columns].tolist():
                assert len(set(row)) == len(row) and set(row) <= set(allowed)
        groups = np.array([digest(str(i % 5)) for i in batch.sample_id.tolist()], np.uint64).view(np.int64)
        assert batch.group.tolist() == groups.tolist()
        texts = [[f"number {value - 10}" for value in row] for row in batch.text[..., 1].tolist()]
        keys = np.array([[digest(text) for text in row] for row in texts], np.uint64).view(np.int64)
        assert batch.caption_key.tolist() == keys.tolist()


def test_as_many_captions_as_a_sample_has_are_given_in_their_order(folder):
    _, batches = epoch(folder, views=Views(captions=4), caption_key="captions")
    assert all(numbers_of(batch).tolist() == [[0, 1, 2, 3]] * 12 for batch in batches)
    _, batches = epoch(folder, views=Views(captions=3), caption_key=[".txt", "short"])
    assert all(numbers_of(batch).tolist() == [[90, 10, 90]] * 12 for batch in batches)


def test_captions_are_drawn_by_the_probabilities_of_their_keys(folder):
    probabilities = {".txt": 0.1, "short": 0.3, "captions": 0.6}
    _, batches = epoch(folder, stop=100, caption_key=probabilities)
    numbers = torch.cat([batch.text[:, 1] - 10 - 100 * batch.sample_id for batch in batches])
    drawn = [(numbers == 90).float().mean(), (numbers == 10).float().mean(), (numbers < 4).float().mean()]
    # Four standard deviations of 1200 draws.
    for share, probability in zip(drawn, probabilities.values(), strict=True):
        assert abs(share - probability) < 4 * (probability * (1 - probability) / 1200) ** 0.5
    _, batches = epoch(folder, views=Views(captions=5), caption_key=probabilities)
    assert all(len(set(row)) == 5 for batch in batches for row in numbers_of(batch).tolist())


def test_without_views_a_batch_is_that_of_the_plain_caption_and_image(folder):
    _, plain = epoch(folder, caption_key="captions")
    _, rich = epoch(folder, **EVERYTHING)
    for first, second in zip(plain, rich, strict=True):
        assert first.views == Views() and first.group is None and first.text.ndim == 2
        assert first.caption_key.shape == (12,) and first.image.ndim == 4
        assert torch.equal(first.image, second.image[:, 0]), "further crops do not change the first"


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_workers_and_a_resumed_run_read_the_same_views(folder, workers):
    settings = EVERYTHING | {"workers": workers, "flip": 0.5, "rand_augment": [2, 7]}
    _, whole = epoch(folder, stop=4, **(settings | {"workers": 0}))
    _, resumed = epoch(folder, start=2, stop=4, **settings)
    assert all(map(equal, resumed, whole[2:]))
    for rank in range(2):
        _, part = epoch(folder, stop=4, world=World(rank, 2), **settings)
        assert all(equal(own, batch.split(6)[rank]) for own, batch in zip(part, whole, strict=True))


def test_another_epoch_draws_other_captions_and_crops(folder):
    _, batches = epoch(folder, stop=4, **EVERYTHING)
    first, second = (
        {name: torch.cat([getattr(batch, name) for batch in part]) for name in ("sample_id", "text", "image")}
        for part in (batches[:2], batches[2:])
    )
    first, second = ({name: part[name][part["sample_id"].argsort()] for name in part} for part in (first, second))
    assert torch.equal(first["sample_id"], second["sample_id"])
    assert not torch.equal(first["text"][:, :3], second["text"][:, :3])
    assert not torch.equal(first["image"], second["image"])


def test_the_images_of_regions_are_the_first_further_crops(tmp_path):
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, :20], pixels[:, 20:] = 50, 200
    stream = BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    boxes = [["number 7", 0, 0, 0.5, 1], ["number 8", 0.5, 0, 1, 1]]
    facts = json.dumps({"boxes": boxes, "caption": "number 7 or 9"}).encode()
    write_shard(
        tmp_path / "0.tar", [(str(i), {"png": stream.getvalue(), "txt": b"number 1", "json": facts}) for i in range(12)]
    )
    _, (batch,) = epoch(tmp_path, stop=1, views=Views(boxes=2, crops=3), box_key="boxes", crop_scale=[0.9, 1.0])
    assert (batch.text[:, 1:, 1] - 10).tolist() == [[7, 8]] * 12
    means = batch.image.float().mean(dim=(2, 3, 4))
    assert (means[:, 1] == 50).all() and (means[:, 2] == 200).all() and ((means[:, 3] > 60) & (means[:, 3] < 190)).all()


def test_rows_of_grit_are_read(tmp_path):
    facts = json.dumps({"caption": "number 7 on number 9", "noun_chunks": [[12.0, 20.0, 0.1, 0.2, 0.9, 0.8, 0.99]]})
    row = {"png": picture(1), "txt": b"number 7 on number 9", "json": facts.encode()}
    write_shard(tmp_path / "0.tar", [(str(i), row) for i in range(12)])
    _, (batch,) = epoch(tmp_path, stop=1, views=Views(boxes=1, crops=1), box_key="noun_chunks")
    assert (batch.text[:, 1, 1] == 19).all() and batch.image.shape[1] == 2


def test_a_sample_with_too_few_texts_repeats_its_own_and_is_counted(tmp_path):
    few = {"captions": ["number 300", "number 301"], "hard": "number 350", "boxes": [["number 370", 0, 0, 1, 1]]}
    settings = EVERYTHING | {"views": Views(captions=3, hard=2, boxes=2)}
    data, batches = epoch(write(tmp_path / "s", {3: few}), tmp_path / "run", **settings)
    texts = torch.cat([numbers_of(batch)[batch.sample_id == 3] for batch in batches])
    assert texts.tolist() == [[0, 1, 0, 50, 50, 70, 70]]
    assert data.counters() == {"repeated_caption": 1, "repeated_hard": 1, "repeated_box": 1}
    lines = [json.loads(line) for line in (tmp_path / "run" / "bad_samples.rank0.jsonl").read_text().splitlines()]
    assert [(line["key"], line["kind"], line["reason"], line["replaced_by"]) for line in lines][0] == (
        "000003", "repeated_caption", "2 instead of 3: they are repeated", None,
    )  # fmt: skip


BAD = {
    "no captions": ({"captions": ...}, "missing_caption", "json has no data.caption_key 'captions', but: short, hard"),
    "no hard negatives": ({"hard": None}, "missing_hard", "json has no data.hard_key 'hard', but: captions, short"),
    "a number as a hard negative": ({"hard": [3]}, "bad_hard", r"hard is \[3\], neither a text nor a list of texts"),
    "blank hard negatives": ({"hard": [" "]}, "empty_hard", "hard has no letter or digit"),
    "no regions": ({"boxes": ...}, "missing_box", "json has no data.box_key 'boxes', but"),
    "an empty list of regions": ({"boxes": []}, "empty_box", "boxes has no region"),
    "a region without area": ({"boxes": [["number 1", 0.5, 0, 0.5, 1]]}, "bad_box", "boxes has .'number 1', 0.5, 0, 0"),
    "a region of text": ({"boxes": "number 1"}, "bad_box", "boxes has 'number 1', not .caption, left, top"),
    "a region with three edges": ({"boxes": [["number 1", 0, 0, 1]]}, "bad_box", "shares of the image"),
    "a region that is not a number": ({"boxes": [["number 1", 0, 0, 1, float("nan")]]}, "bad_box", "shares"),
    "a reference to a missing caption": (
        {"boxes": [[0, 4, 0, 0, 1, 1, 1]]},
        "missing_box",
        "no data.box_key 'caption'",
    ),
    "no group": ({"group": ...}, "missing_group", "json has no data.group_key 'group', but"),
    "a list as a group": ({"group": [1]}, "bad_group", r"group is \[1\], neither a text nor a number"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_sample_without_a_key_is_replaced_counted_and_named(tmp_path, name):
    changes, kind, reason = BAD[name]
    data, batches = epoch(write(tmp_path / "s", {3: changes}), tmp_path / "run", max_bad_fraction=0.05, **EVERYTHING)
    assert data.counters() == {kind: 1}
    (line,) = (tmp_path / "run" / "bad_samples.rank0.jsonl").read_text().splitlines()
    line = json.loads(line)
    assert (line["sample_id"], line["key"]) == (3, "000003") and line["replaced_by"].endswith("0.tar 000004")
    assert re.search(reason, line["reason"]), line["reason"]
    replaced = torch.cat([batch.text[batch.sample_id == 3, :, 1] for batch in batches]) - 10
    assert (replaced // 100 == 4).all()


def test_a_damaged_shard_with_views_keeps_the_ids_and_draws_of_other_samples(folder, tmp_path):
    write(tmp_path / "s")
    data = opened(tmp_path / "s", max_bad_fraction=0.5, **EVERYTHING)
    path = tmp_path / "s" / "1.tar"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    damaged = list(batches_of(data, 2, 12))
    _, whole = epoch(folder, **EVERYTHING)
    intact = [(batch.sample_id < 8) | (batch.sample_id >= 16) for batch in whole]
    for first, second, rows in zip(damaged, whole, intact, strict=True):
        assert equal(first.map(itemgetter(rows)), second.map(itemgetter(rows)))
    assert set(data.counters()) == {"shard_changed"}


def test_shards_of_a_folder_count_the_captions_of_the_first_key(folder):
    assert opened(folder, caption_key=["captions", ".txt"]).captions().pairs == COUNT
    first, second = opened(folder, caption_key={".txt": 0.5, "short": 0.5}), opened(folder)
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"views": Views(hard=2)}, "data.views.hard=2 needs data.hard_key"),
        ({"views": Views(boxes=1)}, "data.views.boxes=1 needs data.box_key"),
        ({"caption_key": {"a": 0.5, "b": 0.4}}, "probabilities must be above 0 and sum to 1, not to 0.9"),
        ({"caption_key": {"a": 0, "b": 1}}, "probabilities must be above 0"),
        ({"caption_key": []}, r"data.caption_key=\[\] names no key"),
        ({"caption_key": ["a", "a"]}, "caption_key"),
    ],
)
def test_impossible_settings_are_errors_that_name_the_key(folder, changes, message):
    with pytest.raises(ConfigError, match=message):
        opened(folder, **changes)
