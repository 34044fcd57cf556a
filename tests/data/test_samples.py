"""Unusable samples: replaced, counted, logged, and an error above a limit."""

import io
import json
import os
import struct
import tarfile
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from tests.support.shards import batches_of, numbered, opened, picture, write_numbered, write_shard

GOOD = 30


def png_with_size(width, height):
    """Return a PNG whose header states another size."""
    data = bytearray(picture(1))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    return bytes(data)


def jpeg_with_size(width, height):
    data = bytearray(picture(1, file_format="JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def first_half(file_format):
    data = picture(1, file_format=file_format)
    return data[: len(data) // 2]


def with_wrong_pixels():
    """Return a PNG with a wrong bit that zlib does not notice."""
    data = bytearray(picture(3))
    data[48] ^= 1
    return bytes(data)


BAD_IMAGES = {
    "a truncated png": ("png", first_half("PNG"), "undecodable_image"),
    "a truncated jpeg": ("jpg", first_half("JPEG"), "undecodable_image"),
    "a truncated webp": ("webp", first_half("WEBP"), "undecodable_image"),
    "a png with a wrong bit": ("png", with_wrong_pixels(), "undecodable_image"),
    "no image data": ("jpg", b"<html>not found</html>", "undecodable_image"),
    "zero bytes": ("jpg", b"", "empty_image"),
    "an enormous png": ("png", png_with_size(50_000, 50_000), "enormous_image"),
    "a large png": ("png", png_with_size(1_001, 1_000), "enormous_image"),
    "an enormous jpeg": ("jpg", jpeg_with_size(50_000, 50_000), "enormous_image"),
}
BAD_CAPTIONS = {
    "an empty caption": ("txt", b"", "empty_caption"),
    "a blank caption": ("txt", b" \n\t", "empty_caption"),
    "a caption of punctuation": ("txt", b"...!?", "empty_caption"),
    "a caption of zero-width spaces": ("txt", "\u200b\u2060".encode(), "empty_caption"),
    "a caption of emoji": ("txt", "\U0001f600\u2764\ufe0f".encode(), "empty_caption"),
    "a caption in latin-1": ("txt", "caf\u00e9".encode("latin-1"), "caption_not_utf8"),
    "broken json": ("json", b'{"caption": ', "bad_json"),
    "json nested too deep": ("json", b"[" * 100_000, "bad_json"),
    "json of another kind": ("json", b"[1, 2]", "missing_caption"),
    "no such key": ("json", b'{"url": "number 1"}', "missing_caption"),
    "null": ("json", b'{"caption": null}', "missing_caption"),
    "a number": ("json", b'{"caption": 7}', "bad_caption"),
    "a list with a number": ("json", b'{"caption": ["number 1", 7]}', "bad_caption"),
    "an empty list": ("json", b'{"caption": []}', "empty_caption"),
    "blank captions": ("json", b'{"caption": ["", " "]}', "empty_caption"),
    "json in latin-1": ("json", '{"caption": "caf\u00e9"}'.encode("latin-1"), "caption_not_utf8"),
}
BAD = {
    "no image member": ({"txt": b"number 1"}, "missing_image"),
    "no caption": ({"png": picture(1)}, "missing_caption"),
    "no json": ({"png": picture(1), "txt": b"number 1"}, "missing_caption"),
    **{name: ({role: content, "txt": b"number 1"}, kind) for name, (role, content, kind) in BAD_IMAGES.items()},
    **{name: ({"png": picture(1), role: content}, kind) for name, (role, content, kind) in BAD_CAPTIONS.items()},
}
"""Members of a sample, and the kind of its fault."""


def epoch(folder, run=None, **changes):
    """Return (dataset, {id: (number in the caption, image)}) of one epoch in batches of 1."""
    data = opened(folder, run, **changes)
    batches = batches_of(data, data.samples, 1)
    return data, {int(batch.sample_id): (int(batch.text[0, 1]) - 10, batch.image[0]) for batch in batches}


def logged(run, rank=0):
    """Return the lines of the log of a run."""
    return [json.loads(line) for line in (run / f"bad_samples.rank{rank}.jsonl").read_text().splitlines()]


def with_one(tmp_path, members, at=5):
    """Return a folder of one shard with a bad sample at position `at`."""
    samples = numbered(0, GOOD)
    samples[at] = "bad one", members
    write_shard(tmp_path / "s" / "0.tar", samples)
    return tmp_path / "s"


@pytest.mark.parametrize("name", BAD)
def test_a_bad_sample_is_replaced_by_the_next_usable_one_and_logged(tmp_path, name):
    members, kind = BAD[name]
    key = "caption" if "json" in members or name == "no json" else None
    shard = with_one(tmp_path, members) / "0.tar"
    data, samples = epoch(shard.parent, tmp_path / "run", max_bad_fraction=0.05, caption_key=key)
    assert sorted(samples) == list(range(GOOD)) and data.counters() == {kind: 1}
    assert [samples[i][0] for i in range(GOOD)] == [i if i != 5 else 6 for i in range(GOOD)]
    (line,) = logged(tmp_path / "run")
    place = {"sample_id": 5, "shard": str(shard), "key": "bad one", "kind": kind, "replaced_by": f"{shard} 000006"}
    assert line.pop("reason") and line == place


def test_bad_samples_do_not_change_ids_order_and_pixels_of_other_samples(tmp_path):
    write_shard(tmp_path / "whole" / "0.tar", numbered(0, GOOD))
    whole = epoch(tmp_path / "whole")[1]
    data, marked = epoch(with_one(tmp_path, {"png": picture(5), "txt": "\ufeffnumber 5".encode()}))
    assert marked[5][0] == 5 and data.counters() == {}, "a byte order mark is removed"
    damaged = epoch(with_one(tmp_path, BAD["zero bytes"][0]), max_bad_fraction=0.05)[1]
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
    assert logged(tmp_path / "a") == logged(tmp_path / "b") != []


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
    (batch,) = batches_of(data, 1, 20)
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
        list(batches_of(data, 9, 10))
        assert data.counters() == {"empty_image": 3}
    assert len(logged(tmp_path / "run")) == 1


def test_ranks_write_separate_files(tmp_path):
    folder = with_one(tmp_path, BAD["zero bytes"][0])
    for rank in range(2):
        list(batches_of(opened(folder, tmp_path / "run", max_bad_fraction=0.1), 3, 10, world=World(rank, 2)))
    assert sorted(len(logged(tmp_path / "run", rank)) for rank in range(2)) == [0, 1]


def test_the_caption_drawn_from_several_depends_on_the_epoch_and_is_reproducible(tmp_path):
    captions = [f"number {i}" for i in range(5)]
    members = {"png": picture(1), "json": json.dumps({"captions": [*captions, " "]}).encode()}
    write_shard(tmp_path / "0.tar", [(f"{i}", members) for i in range(40)])

    def draw():
        stream = batches_of(opened(tmp_path, caption_key="captions"), 2, 40)
        return [batch.text[batch.sample_id.argsort(), 1] - 10 for batch in stream]

    first, second = draw()
    assert not torch.equal(first, second) and set(first.tolist()) == set(range(5))
    assert all(torch.equal(a, b) for a, b in zip(draw(), (first, second), strict=True))


def encode(image, file_format, **options):
    stream = io.BytesIO()
    image.save(stream, file_format, **options)
    return stream.getvalue()


RED = Image.new("RGB", (20, 20), (200, 40, 40))
ANIMATED = {"save_all": True, "append_images": [Image.new("RGB", (20, 20))]}
KINDS = {
    "cmyk": (encode(RED.convert("CMYK"), "JPEG"), ["cmyk_image"]),
    "palette": (encode(RED.convert("P"), "PNG"), ["palette_image"]),
    "grey": (encode(RED.convert("L"), "PNG"), []),
    "grey jpeg": (encode(RED.convert("L"), "JPEG"), []),
    "black and white": (encode(RED.convert("1"), "PNG"), []),
    "16 bit": (encode(Image.fromarray(np.full((20, 20), 51299, np.uint16)), "PNG"), ["16_bit_image"]),
    "transparent": (encode(RED.convert("RGBA"), "PNG"), ["transparent_image"]),
    "animated gif": (encode(RED, "GIF", **ANIMATED), ["animated_image", "palette_image"]),
    "animated webp": (encode(RED, "WEBP", lossless=True, **ANIMATED), ["animated_image"]),
}


@pytest.mark.parametrize("name", KINDS)
def test_all_kinds_of_images_are_used_and_conversions_to_rgb_are_counted(tmp_path, name):
    encoded, conversions = KINDS[name]
    data, samples = epoch(with_one(tmp_path, {"png": encoded, "txt": b"number 5"}), max_bad_fraction=0.0)
    assert data.counters() == dict.fromkeys(conversions, 1) and samples[5][0] == 5


def test_files_outside_the_shard_are_never_opened(tmp_path):
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
