"""Run directories: made, refused, and removed after a failed start."""

from __future__ import annotations

import pytest

from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.runs import directory as run


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    message = r"file/run cannot be made \(Not a directory\): give another runs="
    with (
        pytest.raises(ConfigError, match=message),
        run.created(tmp_path / "file" / "run", World()),
    ):
        raise AssertionError("the run starts nevertheless")
