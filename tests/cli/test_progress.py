"""Lines about the progress of long work."""

from __future__ import annotations

import re

import pytest

from clipzoo.cli import progress


@pytest.mark.parametrize(
    ("done", "line"), [(1, "^== shards: 1 of 200 images$"), (50, "^== .* images, 3 s left$"), (200, "^$")]
)
def test_the_remaining_time_is_estimated_once_two_percent_are_done(done, line, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    report = progress.Progress("shards", "images")
    report._start -= 1.0
    report(done, 200)
    assert re.search(line, capsys.readouterr().err.strip())
