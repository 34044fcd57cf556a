"""Files that are left out of a dataset: counted, and named in a table that any program reads."""

from __future__ import annotations

import csv
from pathlib import Path

from clipzoo.data.faults import NO_IMAGE_FILE, LeftOut, summary, write_left_out

LEFT_OUT = [
    LeftOut(Path("a\tb\nc.png"), "undecodable_image", 'it says "no"'),
    LeftOut(Path("d.png"), "undecodable_image", "truncated"),
    LeftOut(Path("e.png"), "empty_caption", "the caption has no letter or digit"),
    *(LeftOut(Path(name), NO_IMAGE_FILE, "other") for name in ("1.SVG", "2.svg", "README")),
]


def test_names_with_tabs_and_line_breaks_survive_the_table(tmp_path):
    write_left_out(LEFT_OUT, tmp_path)
    with open(tmp_path / "left_out.tsv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert [(row["file"], row["kind"], row["reason"]) for row in rows] == [
        (str(entry.path), entry.kind, entry.reason) for entry in LEFT_OUT
    ]
    write_left_out([], tmp_path)
    assert not list(tmp_path.iterdir()) and summary([], tmp_path) == []


def test_the_summary_counts_by_kind_and_other_files_by_extension(tmp_path):
    assert summary(LEFT_OUT, tmp_path) == [
        "left out: 2 undecodable image, 1 empty caption",
        "other files, which are not read: 2 .svg, 1 without extension",
        f"{tmp_path}/left_out.tsv names each of them",
    ]
