"""Tiles of kernel values follow the size of the largest cache."""

from __future__ import annotations

import pytest

from clipzoo.ops.tiles import largest_cache, tile_side


@pytest.mark.parametrize(
    ("cache", "side"), [(None, 1280), (32 << 20, 1280), (16 << 20, 896), (1 << 20, 640), (260 << 20, 1280)]
)
def test_a_tile_takes_a_fifth_of_the_cache_within_bounds(cache, side):
    assert tile_side(cache) == side


def test_the_largest_cache_is_read_from_what_linux_reports(tmp_path):
    for index, size in enumerate(["32K", "1024K", "32M", "unknown", ""]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert largest_cache(tmp_path) == 32 << 20
    assert largest_cache(tmp_path / "missing") is None
