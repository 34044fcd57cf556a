"""Unusable samples: replaced, counted, logged, and an error above a limit."""

import io
import json
import os

import numpy as np
import pytest
import torch
from PIL import Image

from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from tests.support.shards import numbered, opened, picture, write_numbered, write_shard

GOOD = 30


def png_with_size(width, height):
    """Return a PNG whose header states another size."""
    import struct
    import zlib

    data = bytearray(picture(1))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    return bytes(data)


def jpeg_with_size(width, height):
    data = bytearray(picture(1, file_format="JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return bytes(data)


def first_half(data):
    return data[: len(data) // 2]


BAD = {
    "a truncated png": ({"png": first_half(picture(1)), "txt": b"number 1"}, "undecodable_image"),
    "a truncated jpeg": ({"jpg": first_half(picture(1, file_format="JPEG")), "txt": b"number 1"}, "undecodable_image"),
    "a truncated webp": ({"webp": first_half(picture(1, file_format="WEBP")), "txt": b"number 1"}, "undecodable_image"),
    "no image data": ({"jpg": b"<html>not found</html>", "txt": b"number 1"}, "undecodable_image"),
    "zero bytes": ({"jpg": b"", "txt": b"number 1"}, "empty_image"),
    "no image member": ({"txt": b"number 1"}, "missing_image"),
    "an enormous png": ({"png": png_with_size(50_000, 50_000), "txt": b"number 1"}, "enormous_image"),
    "a large png": ({"png": png_with_size(1_001, 1_000), "txt": b"number 1"}, "enormous_image"),
    "an enormous jpeg": ({"jpg": jpeg_with_size(50_000, 50_000), "txt": b"number 1"}, "enormous_image"),
    "no caption": ({"png": picture(1)}, "missing_caption"),
    "an empty caption": ({"png": picture(1), "txt": b""}, "empty_caption"),
    "a blank caption": ({"png": picture(1), "txt": b" \n\t"}, "empty_caption"),
    "a caption of punctuation": ({"png": picture(1), "txt": b"...!?"}, "empty_caption"),
    "a caption of zero-width spaces": ({"png": picture(1), "txt": "\u200b\u2060".encode()}, "empty_caption"),
    "a caption of emoji": ({"png": picture(1), "txt": "\U0001f600\u2764\ufe0f".encode()}, "empty_caption"),
    "a caption in latin-1": ({"png": picture(1), "txt": "caf\u00e9".encode("latin-1")}, "caption_not_utf8"),
}
BAD_JSON = {
    "no json": ({"png": picture(1), "txt": b"number 1"}, "missing_caption"),
    "broken json": ({"png": picture(1), "json": b'{"caption": '}, "bad_json"),
    "json nested too deep": ({"png": picture(1), "json": b"[" * 100_000}, "bad_json"),
    "json of another kind": ({"png": picture(1), "json": b"[1, 2]"}, "missing_caption"),
    "no such key": ({"png": picture(1), "json": b'{"url": "number 1"}'}, "missing_caption"),
    "null": ({"png": picture(1), "json": b'{"caption": null}'}, "missing_caption"),
    "a number": ({"png": picture(1), "json": b'{"caption": 7}'}, "bad_caption"),
    "a list with a number": ({"png": picture(1), "json": b'{"caption": ["number 1", 7]}'}, "bad_caption"),
    "an empty list": ({"png": picture(1), "json": b'{"caption": []}'}, "empty_caption"),
    "blank captions": ({"png": picture(1), "json": b'{"caption": ["", " "]}'}, "empty_caption"),
    "json in latin-1": ({"png": picture(1), "json": '{"caption": "caf\u00e9"}'.encode("latin-1")}, "caption_not_utf8"),
}


def epoch(folder, run=None, **changes):
    """Return (dataset, {id: (number in the caption, image)}) of one epoch in batches of 1."""
    data = opened(folder, run, **changes)
    samples = {}
    for batch in data.batches(
        seed=0, global_batch=1, world=World(), start_step=0, stop_step=data.samples, trim_text=True
    ):
        samples[int(batch.sample_id)] = int(batch.text[0, 1]) - 10, batch.image[0]
    return data, samples


def with_one(tmp_path, members, at=5):
    """Return a folder of one shard with a bad sample at position `at`."""
    samples = numbered(0, GOOD)
    samples[at] = "bad one", members
    write_shard(tmp_path / "s" / "0.tar", samples)
    return tmp_path / "s"


@pytest.mark.parametrize("name", [*BAD, *BAD_JSON])
def test_a_bad_sample_is_replaced_by_the_next_usable_one_and_logged(tmp_path, name):
    members, kind = (BAD | BAD_JSON)[name]
    changes = {"caption_key": "caption"} if name in BAD_JSON else {}
    data, samples = epoch(with_one(tmp_path, members), tmp_path / "run", max_bad_fraction=0.05, **changes)
    assert sorted(samples) == list(range(GOOD)) and data.counters() == {kind: 1}
    assert [number for number, _ in (samples[i] for i in range(GOOD))] == [i if i != 5 else 6 for i in range(GOOD)]
    (line,) = map(json.loads, (tmp_path / "run" / "bad_samples.rank0.jsonl").read_text().splitlines())
    assert (
        line["sample_id"] == 5
        and line["shard"] == str(tmp_path / "s" / "0.tar")
        and line["key"] == "bad one"
        and line["kind"] == kind
    )
    assert line["reason"] and line["replaced_by"].endswith("s/0.tar 000006")


def test_bad_samples_do_not_change_ids_order_and_pixels_of_other_samples(tmp_path):
    write_shard(tmp_path / "whole" / "0.tar", numbered(0, GOOD))
    whole = epoch(tmp_path / "whole")[1]
    data, marked = epoch(with_one(tmp_path, {"png": picture(5), "txt": "\ufeffnumber 5".encode()}))
    assert marked[5][0] == 5 and data.counters() == {}, "a byte order mark is removed"
    damaged = epoch(with_one(tmp_path, *BAD["zero bytes"][:1]), max_bad_fraction=0.05)[1]
    assert list(whole) == list(damaged)
    for i in set(range(GOOD)) - {5}:
        assert whole[i][0] == damaged[i][0] and torch.equal(whole[i][1], damaged[i][1])


def test_replacement_is_cyclic_in_the_shard_and_then_continues_in_the_next(tmp_path):
    bad = {"png": b"", "txt": b"number 1"}
    write_shard(tmp_path / "0.tar", [("a", bad), *numbered(1, 2), ("b", bad)])
    write_shard(tmp_path / "1.tar", [("c", bad), ("d", bad)])
    write_shard(tmp_path / "2.tar", numbered(6, 3))
    _, samples = epoch(tmp_path, max_bad_fraction=0.5)
    assert [samples[i][0] for i in range(9)] == [1, 1, 2, 1, 6, 7, 6, 7, 8]


def test_workers_report_the_same_faults_as_the_training_process(tmp_path):
    folder = with_one(tmp_path, BAD["zero bytes"][0])
    without, _ = epoch(folder, tmp_path / "a", max_bad_fraction=0.05)
    with_workers, _ = epoch(folder, tmp_path / "b", max_bad_fraction=0.05, workers=2)
    assert without.counters() == with_workers.counters() == {"empty_image": 1}
    assert (tmp_path / "a" / "bad_samples.rank0.jsonl").read_text() == (
        tmp_path / "b" / "bad_samples.rank0.jsonl"
    ).read_text()


@pytest.mark.parametrize("workers", [0, 2])
def test_training_stops_above_the_fraction_with_counts_examples_and_path(tmp_path, workers):
    samples = numbered(0, GOOD)
    for at in (3, 9, 20):
        samples[at] = f"bad {at}", {"png": b"", "txt": b"number 1"}
    write_shard(tmp_path / "s" / "0.tar", samples)
    message = (
        "3 of .* samples seen .* data.max_bad_fraction 0.07.*empty_image 3.*0.tar bad .*: the image has no bytes.*rank0"
    )
    with pytest.raises(ConfigError, match=message):
        epoch(tmp_path / "s", tmp_path / "run", max_bad_fraction=0.07, workers=workers)
    epoch(tmp_path / "s", max_bad_fraction=0.1, workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_without_usable_samples_is_an_error_with_the_cause(tmp_path, workers):
    write_numbered(tmp_path / "s", [20, 20])
    with pytest.raises(ConfigError, match="no data.caption_key 'title', but: caption"):
        epoch(tmp_path / "s", caption_key="title", workers=workers, max_bad_fraction=1.0)


def test_bad_samples_in_the_first_batches_count_relative_to_a_thousand_samples(tmp_path):
    write_shard(tmp_path / "0.tar", [(f"{i}", {"png": b"", "txt": b"x"}) for i in range(2)] + numbered(2, 198))
    data, _ = epoch(tmp_path, max_bad_fraction=0.01)
    assert data.counters() == {"empty_image": 2}


@pytest.mark.parametrize("damage", ["gone", "shorter", "longer"])
def test_a_shard_that_changes_during_a_run_is_detected(tmp_path, damage):
    folder = write_numbered(tmp_path / "s", [10, 10])
    data = opened(folder, tmp_path / "run", max_bad_fraction=0.6)
    path = folder / "00001.tar"
    content = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(content[:-9000] if damage == "shorter" else content + bytes(512))
    (batch,) = list(data.batches(seed=0, global_batch=20, world=World(), start_step=0, stop_step=1, trim_text=True))
    assert sorted(batch.sample_id.tolist()) == list(range(20))
    assert data.counters() == {"shard_missing" if damage == "gone" else "shard_changed": 10}
    # The lost samples have different replacements.
    replaced = batch.text[batch.sample_id >= 10, 1] - 10
    assert sorted(replaced.tolist()) == list(range(10))


def test_a_shard_deleted_after_indexing_keeps_its_ids_and_counts_as_bad(tmp_path):
    folder = write_numbered(tmp_path / "s", [10, 10, 10])
    shards = str(folder / "{00000..00002}.tar")
    opened(shards)
    (folder / "00001.tar").unlink()
    with pytest.raises(ConfigError, match="33.33%.*00001.tar"):
        opened(shards)
    data, samples = epoch(shards, tmp_path / "run", max_bad_fraction=0.4)
    assert sorted(samples) == list(range(30)) and samples[10][0] == 20
    assert data.counters() == {"missing_shards": 1, "shard_missing": 10}


def test_a_shard_cut_after_indexing_yields_its_remaining_samples(tmp_path):
    folder = write_numbered(tmp_path / "s", [10, 10])
    opened(folder)
    content = (folder / "00001.tar").read_bytes()
    (folder / "00001.tar").write_bytes(content[: 3 * 512 * 2 * 4 + 700])
    data, samples = epoch(folder, max_bad_fraction=0.4)
    assert [samples[i][0] for i in range(10, 20)] == [10, 11, 12, 13] + [10] * 6
    assert data.counters() == {"truncated_shards": 1, "shard_truncated": 6}


def test_samples_are_logged_once_in_a_run_and_its_resumes(tmp_path):
    folder = with_one(tmp_path, BAD["zero bytes"][0])
    for _ in range(2):
        data = opened(folder, tmp_path / "run", max_bad_fraction=0.05)
        list(data.batches(seed=0, global_batch=10, world=World(), start_step=0, stop_step=9, trim_text=True))
        assert data.counters() == {"empty_image": 3}
    assert len((tmp_path / "run" / "bad_samples.rank0.jsonl").read_text().splitlines()) == 1


def test_ranks_write_separate_files(tmp_path):
    folder = with_one(tmp_path, BAD["zero bytes"][0])
    names = set()
    for rank in range(2):
        data = opened(folder, tmp_path / "run", max_bad_fraction=0.1)
        list(data.batches(seed=0, global_batch=10, world=World(rank, 2), start_step=0, stop_step=3, trim_text=True))
        names |= {path.name for path in (tmp_path / "run").glob("bad_samples*") if path.stat().st_size}
    assert len(names) == 1 and names < {"bad_samples.rank0.jsonl", "bad_samples.rank1.jsonl"}


def test_the_caption_drawn_from_several_depends_on_the_epoch_and_is_reproducible(tmp_path):
    captions = [f"number {i}" for i in range(5)]
    members = {"png": picture(1), "json": json.dumps({"captions": [*captions, " "]}).encode()}
    write_shard(tmp_path / "0.tar", [(f"{i}", members) for i in range(40)])

    def draw():
        data = opened(tmp_path, caption_key="captions")
        stream = data.batches(seed=0, global_batch=40, world=World(), start_step=0, stop_step=2, trim_text=True)
        return [batch.text[batch.sample_id.argsort(), 1] - 10 for batch in stream]

    first, second = draw()
    assert not torch.equal(first, second) and set(first.tolist()) == set(range(5))
    assert all(torch.equal(a, b) for a, b in zip(draw(), (first, second), strict=True))


def encode(image, **options):
    stream = io.BytesIO()
    image.save(stream, **options)
    return stream.getvalue()


def red(mode, size=(20, 20)):
    return Image.new("RGB", size, (200, 40, 40)).convert(mode)


def half_transparent():
    image = Image.new("RGBA", (20, 20), (0, 0, 0, 0))
    image.paste((200, 40, 40, 255), (0, 0, 20, 10))
    return image


KINDS = {
    "cmyk": (encode(red("CMYK"), format="JPEG", quality=95), {"cmyk_image": 1}, [200, 40, 40]),
    "palette": (encode(red("P"), format="PNG"), {"palette_image": 1}, None),
    "grey": (encode(Image.new("L", (20, 20), 90), format="PNG"), {}, [90, 90, 90]),
    "grey jpeg": (encode(Image.new("L", (20, 20), 90), format="JPEG"), {}, [90, 90, 90]),
    "black and white": (encode(Image.new("1", (20, 20), 1), format="PNG"), {}, [255, 255, 255]),
    "16 bit": (
        encode(Image.fromarray(np.full((20, 20), 200 * 256 + 99, np.uint16)), format="PNG"),
        {"16_bit_image": 1},
        [200, 200, 200],
    ),
    "animated gif": (
        encode(red("RGB"), format="GIF", save_all=True, append_images=[Image.new("RGB", (20, 20))]),
        {"animated_image": 1, "palette_image": 1},
        None,
    ),
    "animated webp": (
        encode(red("RGB"), format="WEBP", lossless=True, save_all=True, append_images=[Image.new("RGB", (20, 20))]),
        {"animated_image": 1},
        [200, 40, 40],
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_all_kinds_of_images_become_rgb_and_conversions_are_counted(tmp_path, name):
    encoded, conversions, colour = KINDS[name]
    data, samples = epoch(with_one(tmp_path, {"png": encoded, "txt": b"number 5"}), max_bad_fraction=0.0)
    assert data.counters() == conversions and samples[5][0] == 5
    shown = samples[5][1].float().mean((1, 2))
    expected = torch.tensor(colour or [200, 40, 40], dtype=torch.float)
    assert (shown - expected).abs().max() < (8 if colour else 30)


def test_transparent_images_are_composited_over_white(tmp_path):
    data, samples = epoch(
        with_one(tmp_path, {"png": encode(half_transparent(), format="PNG"), "txt": b"number 5"}), crop_scale=[1.0, 1.0]
    )
    assert data.counters() == {"transparent_image": 1}
    image = samples[5][1]
    assert (image[:, -1] == 255).all() and image[:, 0].float().mean(-1).tolist() == pytest.approx([200, 40, 40], abs=2)


def test_files_outside_the_shard_are_never_opened(tmp_path):
    import tarfile

    secret = tmp_path / "secret.txt"
    secret.write_text("number 99")
    with tarfile.open(write_shard(tmp_path / "s" / "0.tar", numbered(0, 4)), "a") as archive:
        entry = tarfile.TarInfo("000009.txt")
        entry.type, entry.linkname = tarfile.SYMTYPE, str(secret)
        archive.addfile(entry)
        entry = tarfile.TarInfo("000009.png")
        entry.size = len(picture(9))
        archive.addfile(entry, io.BytesIO(picture(9)))
    data, samples = epoch(tmp_path / "s", max_bad_fraction=0.5)
    assert data.counters() == {"missing_caption": 1} and samples[4][0] == 0
    assert not os.path.exists("000009.txt")
