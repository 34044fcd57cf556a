"""`clipzoo shards look` counts unusable samples as training does; files that are left out of a dataset."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from clipzoo.cli import __main__ as commands
from clipzoo.data.faults import NO_IMAGE_FILE, LeftOut, summary, write_left_out
from tests.support.shards import batches_of, numbered, opened, picture, write_shard

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


@pytest.mark.medium
def test_look_counts_what_training_replaces(folder, tmp_path, capsys):
    command = ["shards", "look", folder, "--on", "local:1", "--output", tmp_path / "look", "--max-pixels", PIXELS]
    options = commands._parser().parse_args([*map(str, command), "--batch", "4"])
    options.run(options)
    text = capsys.readouterr().out
    numbers = json.loads((tmp_path / "look" / "numbers.json").read_text())
    assert numbers["unusable samples"] == {"undecodable_image": 10, "empty_caption": 5, "enormous_image": 3}
    assert numbers["converted to RGB"] == {"transparent_image": 2}
    data = opened(folder, max_pixels=PIXELS, max_bad_fraction=1.0)
    list(batches_of(data, 1, 40))
    assert {kind: data.counters()[kind] for kind in numbers["unusable samples"]} == numbers["unusable samples"]
    lines = dict(re.split("  +", line, maxsplit=1) for line in text.splitlines())
    assert (lines["samples"], lines["shards"], lines["usable samples"]) == ("40", "2", "22")
    assert lines["unusable samples"].startswith("10 undecodable image, such as 000000: ")
    assert "; 5 empty caption, such as 000010: " in lines["unusable samples"]
    assert lines["converted to RGB"] == "2 transparent image" and "median 24" in lines["width"]


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
