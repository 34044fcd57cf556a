"""Brace patterns of data.shards: counted before they are expanded."""

from __future__ import annotations

import time

import pytest

from clipzoo.data.locations import parse_sources
from clipzoo.errors import ConfigError


@pytest.mark.parametrize(
    "pattern",
    [
        "{00000..99999999}.tar", "{0..9999}/{0..9999}.tar", "{a,{0..99999999}}.tar", "{{0..99999}{0..99999},b}.tar",
        "{a,b}" * 25, "{a,b}" * 5000, "{99999999..0}.tar", "{-5..1000000}.tar", f"{{0..{'9' * 5000}}}.tar",
        f"{{{'9' * 30}..1}}.tar", "{0..1000000}", "pipe:cat {0..99999999}.tar", "https://h/{0..99999999}.tar",
    ],
    ids=lambda pattern: pattern[:30],
)  # fmt: skip
def test_a_pattern_of_too_many_shards_is_refused_at_once(pattern):
    begin = time.process_time()
    with pytest.raises(ConfigError, match="matches more than 1,000,000 shards"):
        parse_sources(pattern)
    assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("{00000..00331}.tar", 332), ("{a,b}/{0..9}.tar", 20), ("{a/{0..3},b/{0..5}}.tar", 10), ("{0..10..2}.tar", 6),
        ("{3..1}.tar", 3), ("x{y}z.tar", 1), ("{-2..2}.tar", 5), ("{a,b,{c,d}{0..1}}.tar", 6), ("{0..10..0}.tar", 11),
    ],
)  # fmt: skip
def test_ordinary_patterns_are_expanded(pattern, count):
    (source,) = parse_sources(pattern)
    assert len(source.shards) == count


@pytest.mark.parametrize("name", ["x.csv", "/data/pairs.TSV", "dataset_coco.json"])
def test_a_table_of_captions_is_no_shard_and_the_message_names_the_commands_that_take_it(name):
    with pytest.raises(ConfigError, match=f"={name} is a table, not shards: train with data=table data.path={name},"):
        parse_sources(name)
