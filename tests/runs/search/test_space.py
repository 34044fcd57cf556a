"""Ranges of a search."""

from __future__ import annotations

import re

import pytest

from clipzoo.errors import ConfigError
from clipzoo.runs.search import Choice, Interval, space_of
from clipzoo.runs.sweep import of_search_option


def test_every_kind_of_range_is_read_from_the_grammar_of_sweeps():
    space = space_of(
        [], ["a=interval(0.5,2)", "b=tag(log,interval(1e-4,1e-2))", "c=int(interval(1,8))", "d=x,y", "e=[1,2],[3,4]",
             "f=int(tag(log,interval(1,64)))", "g=7"],
    )  # fmt: skip
    assert list(space.dimensions.values()) == [
        Interval("a", 0.5, 2.0, log=False, whole=False), Interval("b", 1e-4, 1e-2, log=True, whole=False),
        Interval("c", 1, 8, log=False, whole=True), Choice("d", ("x", "y")), Choice("e", ("[1,2]", "[3,4]")),
        Interval("f", 1, 64, log=True, whole=True),
    ]  # fmt: skip
    values = {key: dimension.at(0.0) for key, dimension in space.dimensions.items()}
    assert space.overrides(values) == ("a=0.5", "b=0.0001", "c=1", "d=x", "e=[1,2]", "f=1", "g=7")


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("log", [False, True])
def test_draws_stay_inside_an_interval_and_have_four_digits(log, whole):
    dimension = Interval("a", 3, 40, log, whole)
    values = [dimension.at(share / 997) for share in range(997)]
    assert min(values) == 3 and max(values) == pytest.approx(40, rel=1e-2) and max(values) <= 40
    assert all(float(f"{value:.4g}") == value for value in values)
    assert not whole or all(isinstance(value, int) for value in values) and set(values) == set(range(3, 41))
    below = sum(value < 11 for value in values)  # the geometric mean of 3 and 40
    assert below == pytest.approx(997 * (0.5 if log else 8 / 37), rel=0.1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a=interval(2,1)", "the first end of an interval must be smaller than the second"),
        ("a=interval(1,1)", "the first end of an interval must be smaller than the second"),
        ("a=interval(-inf,1)", "both finite"),
        ("a=tag(log,interval(0,1))", "a logarithmic interval begins above 0"),
        ("a=tag(lgo,interval(1,2))", "has the tag lgo: the only tag of a range is log"),
        ("a=glob(*)", "a=glob(*) has no value"),
        ("data.workers=1,2", "data.workers does not affect the result of a run"),
        ("name=a,b", "name does not affect the result of a run"),
        ("a=1", "the search has no ranges"),
    ],
)
def test_a_wrong_range_is_one_message(line, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        space_of([], [line])


def test_a_sampler_that_cannot_draw_from_the_space_is_refused():
    with pytest.raises(ConfigError, match="search.sampler=grid takes lists, and a is an interval"):
        space_of([], ["a=interval(0,1)"]).require("grid")
    with pytest.raises(ConfigError, match="would select a lucky seed"):
        space_of([], ["seed=0,1"]).require("tpe")
    space_of([], ["seed=0,1"]).require("grid")


def test_the_command_line_replaces_ranges_of_the_search_file():
    lines = ["head=wpse", "search=wpse", "head.kernel.width=interval(0.25,2)", "search.sampler=tpe"]
    space = space_of(of_search_option(lines), lines)
    assert {key: type(dimension) for key, dimension in space.dimensions.items()} == {
        "head.alpha": Choice, "head.kernel.width": Interval,
    }  # fmt: skip
    assert space.overrides({"head.alpha": "[0.5,0.5]", "head.kernel.width": 0.7}) == (
        "head.alpha=[0.5,0.5]", "head=wpse", "search=wpse", "head.kernel.width=0.7",
    )  # fmt: skip


def test_the_last_override_of_a_key_counts():
    space = space_of([], ["a=interval(0,1)", "b=x,y", "a=3", "b=u,v", "c=1"])
    assert list(space.dimensions) == ["b"]
    assert space.overrides({"b": "v"}) == ("a=3", "b=v", "c=1")


def test_corners_hold_every_value_of_a_list_and_both_ends_of_an_interval():
    space = space_of([], ["a=x,y,z", "b=interval(0.5,2)"])
    assert space.corner_lines() == [("a=x", "b=0.5"), ("a=y", "b=2.0"), ("a=z", "b=2.0")]
    assert space.count == float("inf") and space_of([], ["a=x,y", "b=int(interval(1,8))"]).count == 16
