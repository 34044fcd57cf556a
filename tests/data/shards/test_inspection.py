"""Inspection of shards, which counts unusable samples as training does; files that are left out of a dataset."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from PIL import Image

from clipzoo.data.faults import NO_IMAGE_FILE, LeftOut, summary, write_left_out
from clipzoo.data.write import describe
from tests.support.shards import batches_of, inspected, numbered, opened, picture, write_shard

PIXELS = 10_000


@pytest.fixture
def folder(tmp_path):
    """40 samples: 10 cut images, 5 captions without text, 3 images above the limit of pixels, 2 with transparency."""
    samples = numbered(0, 40)
    for number, (_, members) in enumerate(samples):
        if number < 10:
            members["png"] = members["png"][: len(members["png"]) // 2]
        elif number < 15:
            members["txt"] = b" \n"
        elif number < 18:
            members["png"] = picture(number, (200, 100))
        elif number < 20:
            stream = io.BytesIO()
            Image.open(io.BytesIO(members["png"])).convert("RGBA").save(stream, "PNG")
            members["png"] = stream.getvalue()
    for shard in range(2):
        write_shard(tmp_path / f"{shard:05d}.tar", samples[20 * shard : 20 * shard + 20])
    return tmp_path


def test_inspection_counts_what_training_replaces(folder):
    index, statistics = inspected(folder, tiles=4, max_pixels=PIXELS)
    assert statistics.bad == {"undecodable_image": 10, "empty_caption": 5, "enormous_image": 3}
    data = opened(folder, max_pixels=PIXELS, max_bad_fraction=1.0)
    list(batches_of(data, 1, 40))
    assert {kind: data.counters()[kind] for kind in statistics.bad} == statistics.bad
    text = describe(index, statistics, batch=4)
    assert "of which cannot be used: 18 (10 undecodable image, 5 empty caption, 3 enormous image)" in text
    assert "converted to RGB   2 (2 transparent image)" in text
    assert "00000.tar 000000: " in text and len(statistics.tiles) <= 4
    # A quick inspection reads headers only.
    assert inspected(folder, decode=False, max_pixels=PIXELS)[1].bad == {"empty_caption": 5, "enormous_image": 3}


@pytest.mark.medium
def test_several_processes_count_as_one_does(folder, monkeypatch):
    monkeypatch.setattr("clipzoo.data.write._CHUNK", 7)
    seen = []
    _, alone = inspected(folder)
    _, together = inspected(folder, processes=2, progress=lambda done, total: seen.append((done, total)))
    assert together == alone
    assert seen == [(done, 40) for done in (7, 14, 21, 28, 35, 40)]


def test_files_that_are_left_out_are_counted_and_named_in_a_table_that_any_program_reads(tmp_path):
    left_out = [
        LeftOut(Path("a\tb\nc.png"), "undecodable_image", 'it says "no"'),
        LeftOut(Path("d.png"), "undecodable_image", "truncated"),
        LeftOut(Path("e.png"), "empty_caption", "the caption has no letter or digit"),
        *(LeftOut(Path(name), NO_IMAGE_FILE, "other") for name in ("1.SVG", "2.svg", "README")),
    ]
    write_left_out(left_out, tmp_path)
    with open(tmp_path / "left_out.tsv", newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter="\t"))
    assert rows == [["file", "kind", "reason"], *([str(entry.path), entry.kind, entry.reason] for entry in left_out)]
    assert summary(left_out, tmp_path) == [
        "left out: 2 undecodable image, 1 empty caption",
        "other files, which are not read: 2 .svg, 1 without extension",
        f"{tmp_path}/left_out.tsv names each of them",
    ]
    write_left_out([], tmp_path)
    assert not list(tmp_path.iterdir()) and summary([], tmp_path) == []
