"""Shards that are missing, truncated, damaged or empty before training starts, and the samples lost with them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from clipzoo import io
from clipzoo.data.faults import Fault
from clipzoo.data.shards.index import Shard, ShardIndex
from clipzoo.data.shards.locations import is_remote
from clipzoo.data.shards.scan import ROLES
from clipzoo.data.shards.tar import UNTERMINATED
from clipzoo.errors import ConfigError, number_of

_log = logging.getLogger(__name__)
_SHOWN = 3
# Larger than any number of samples, so that the fraction of lost samples is near 1.
_UNKNOWN = 10**15


def check_shards(indexes: Sequence[ShardIndex], max_bad_fraction: float) -> list[Fault]:
    """Return a fault for every shard with a flaw or repeated keys.

    Raises ConfigError if the fraction of lost samples exceeds max_bad_fraction. A shard that was cut after it was
    indexed lost the samples beyond its present end. Any other flawed shard is expected to hold as many samples as
    img2dataset's `<shard>_stats.json` states, or else the median of the intact shards.
    """
    faults: list[Fault] = []
    present = sum(index.samples for index in indexes)
    cut = never_indexed = 0
    for index in indexes:
        usual = _median_count(index)
        for number, shard in enumerate(index.shards):
            if shard.flaw is None and shard.count and not shard.duplicates:
                continue
            shard_cut = _cut_samples(index, number)
            shard_rest = 0 if shard_cut else max(0, _expected(shard, index.locations[number], usual) - shard.count)
            cut, never_indexed = cut + shard_cut, never_indexed + shard_rest
            faults += _faults(index, number, shard_cut + shard_rest)
    if not present:
        raise ConfigError(_no_samples(indexes))
    fraction = (cut + never_indexed) / (present + never_indexed)
    if fraction > max_bad_fraction:
        shown = "; ".join(f"{fault.shard}: {fault.reason}" for fault in faults[:_SHOWN])
        raise ConfigError(
            f"data.shards lacks about {fraction:.2%} of its samples, more than data.max_bad_fraction "
            f"{max_bad_fraction}: {number_of(len(faults), 'damaged shard')}. {shown}. Download them again, remove "
            "them from "
            "data.shards, or raise data.max_bad_fraction."
        )
    for fault in faults[: _SHOWN * 3]:
        _log.warning("shard %s: %s", fault.shard, fault.reason)
    return faults


def _no_samples(indexes: Sequence[ShardIndex]) -> str:
    shards = [pair for index in indexes for pair in zip(index.locations, index.shards, strict=True)]
    shown = "; ".join(f"{location}: {shard.flaw or 'no samples'}" for location, shard in shards[:_SHOWN])
    more = f"; and {len(shards) - _SHOWN} more" if len(shards) > _SHOWN else ""
    demo = any("data/demo/" in location for location, _ in shards)
    hint = ". `clipzoo world` makes the demo's in data/demo" if demo else ""
    return f"data.shards: none of the shards holds a sample. {shown}{more}{hint}"


def _faults(index: ShardIndex, number: int, lost: int) -> list[Fault]:
    shard, location, faults = index.shards[number], index.locations[number], []
    if shard.flaw is not None or not shard.count:
        loss = "an unknown number of" if lost >= _UNKNOWN else f"about {lost}"
        reason = f"{shard.flaw or 'no samples'}; {loss} samples are lost"
        faults.append(Fault(-1, location, "", _kind(shard), reason, None))
    if shard.duplicates:
        repeated = [key for key, times in Counter(index.keys(number)).items() if times > 1]
        reason = f"keys that occur more than once, each time as a sample: {', '.join(repeated[:_SHOWN])}, ..."
        faults.append(Fault(-1, location, "", "duplicate_keys", reason, None))
    return faults


def _kind(shard: Shard) -> str:
    if shard.state[0] < 0:
        return "missing_shards"
    return "empty_shards" if not shard.count else "truncated_shards"


def _median_count(index: ShardIndex) -> int:
    """Return the median number of samples of the intact shards; _UNKNOWN if there is none."""
    intact = [shard.count for shard in index.shards if shard.count and shard.flaw in (None, UNTERMINATED)]
    return int(np.median(intact)) if intact else _UNKNOWN


def _expected(shard: Shard, location: str, usual: int) -> int:
    if shard.flaw is None and shard.count:
        return shard.count
    if not is_remote(location):
        stats = Path(location).with_name(f"{Path(location).stem}_stats.json")
        if stats.is_file():
            return io.DamageLog().read(partial(_successes, stats), usual)
    return usual


def _successes(stats: Path) -> int:
    """Number of samples that img2dataset states for a shard. Raises DamagedFileError."""
    content = io.read_json(stats, io.MB, "the size of other shards is used")
    io.require_fields(stats, content, {"successes": int}, "the size of other shards is used")
    return content["successes"]


def _cut_samples(index: ShardIndex, number: int) -> int:
    """Return how many indexed samples extend beyond the present end of the file."""
    shard = index.shards[number]
    if shard.state[0] >= shard.bytes:
        return 0
    records = index.records_of(number)
    ends = np.max([records[f"{role}_offset"] + records[f"{role}_size"] for role in ROLES], axis=0)
    return int((ends.astype(np.int64) > shard.state[0]).sum())
