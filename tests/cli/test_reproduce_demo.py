"""The demo that trains a row of every paper."""

from __future__ import annotations

import json

import pytest

from clipzoo.lab import reproduce
from clipzoo.report.published import axes, search_of

GAUSSIAN = "wpse/CC3M/WPSE Gaussian"


@pytest.mark.medium
def test_the_demo_has_a_row_of_every_paper_at_a_point_of_its_search(tmp_path):
    jobs = reproduce.jobs_of(reproduce.ROWS, tmp_path)
    assert {job.row.split("/")[0] for job in jobs} == {"wpse", "kme", "cloob", "nuclr"}
    assert len({job.folder for job in jobs}) == len(jobs)
    for row, overrides in reproduce.ROWS.items():
        search = search_of(row)
        for override in set(overrides) - {*reproduce.WPSE, *reproduce.CLOOB}:
            key, value = override.split("=")
            assert json.loads(value) in axes(search.name)[key]


@pytest.mark.slow
def test_finished_rows_of_the_demo_are_skipped_and_a_failed_row_is_named(tmp_path, capsys):
    done, bad = reproduce.jobs_of({"wpse/CC3M/CLIP": (), GAUSSIAN: ("data.shards=nowhere",)}, tmp_path)
    done.folder.mkdir()
    (done.folder / "results.json").write_text("{}")
    assert [job.row for job in reproduce.train([done, bad], 2)] == [GAUSSIAN]
    assert done.process is None
    output = capsys.readouterr().out
    assert "CLIP: finished before, skipped" in output
    assert "WPSE Gaussian: failed" in output and "nowhere" in output
