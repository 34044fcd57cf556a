"""Heads and objectives against the numbers of the papers' released code; tests/golden/README.md describes them."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

from scripts.golden_table import FILES, PAGE, TOLERANCES, Comparison, compare, read


@cache
def comparisons(file: str, dtype: torch.dtype) -> list[Comparison]:
    return list(compare(file, dtype))


every_file = pytest.mark.parametrize("file", FILES)


@every_file
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_every_value_is_that_of_the_released_code(file, dtype):
    missed = {one.names: one.error for one in comparisons(file, dtype) if not one.agrees}
    assert not missed


@every_file
def test_every_array_is_compared_or_is_an_input(file):
    compared = {name for one in comparisons(file, torch.float64) for name in one.names}
    rest = {name for name in read(file) if not re.fullmatch(FILES[file].other, name)}
    assert compared == rest


def test_only_the_smallest_losses_and_slopes_of_cloob_are_judged_by_their_terms():
    judged = {name for file in FILES for one in comparisons(file, torch.float64) if one.cancels for name in one.names}
    assert all(
        re.fullmatch(r"b[14]_(infoloob|hopfield_infonce)_(loss|loss_1|loss_2|grad_inv_tau)", name) for name in judged
    )


@every_file
def test_the_page_counts_the_compared_values(file):
    compared = comparisons(file, torch.float64)
    arrays, values = sum(len(one.names) for one in compared), sum(one.ours.numel() for one in compared)
    assert f"| {arrays} | {values:,} |" in PAGE.read_text()
