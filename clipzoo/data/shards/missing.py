"""What a set lost before it was ever read: shards that are missing, cut short, damaged or empty."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from clipzoo.data.shards.faults import Finding
from clipzoo.data.shards.index import Shard, ShardIndex
from clipzoo.data.shards.scan import ROLES
from clipzoo.data.shards.sources import is_remote
from clipzoo.data.shards.tar import UNTERMINATED
from clipzoo.errors import ConfigError

_log = logging.getLogger(__name__)
_SHOWN = 3
# As good as infinitely many samples.
_UNKNOWN = 10**15


def check_shards(indexes: Sequence[ShardIndex], max_bad_fraction: float) -> list[Finding]:
    """A finding for every shard with a flaw or repeated keys; ConfigError if too many samples went with them.

    A shard that was whole when it was indexed has lost what lies beyond its end now. One that never was should have
    as many samples as img2dataset's `<shard>_stats.json` says it wrote, or else as the median of the whole shards.
    """
    findings: list[Finding] = []
    present = sum(index.samples for index in indexes)
    cut = never = 0
    for index in indexes:
        usual = _usual_count(index)
        for number, shard in enumerate(index.shards):
            if shard.flaw is None and shard.count and not shard.duplicates:
                continue
            cut_here = _cut_samples(index, number)
            never_here = 0 if cut_here else max(0, _expected(shard, index.locations[number], usual) - shard.count)
            cut, never = cut + cut_here, never + never_here
            findings += _findings(index, number, cut_here + never_here)
    if not present:
        raise ConfigError(_nothing(indexes))
    shown = "; ".join(f"{each.shard}: {each.reason}" for each in findings[:_SHOWN])
    share = (cut + never) / (present + never)
    if share > max_bad_fraction:
        raise ConfigError(
            f"data.shards lacks about {share:.2%} of its samples, more than data.max_bad_fraction {max_bad_fraction}: "
            f"{len(findings)} shards are not whole. {shown}. Fetch them again, leave them out of data.shards, "
            "or raise data.max_bad_fraction."
        )
    for finding in findings[: _SHOWN * 3]:
        _log.warning("shard %s: %s", finding.shard, finding.reason)
    return findings


def _nothing(indexes: Sequence[ShardIndex]) -> str:
    shards = [pair for index in indexes for pair in zip(index.locations, index.shards, strict=True)]
    shown = "; ".join(f"{location}: {shard.flaw or 'no samples'}" for location, shard in shards[:_SHOWN])
    more = f"; and {len(shards) - _SHOWN} more" if len(shards) > _SHOWN else ""
    demo = any("data/demo/" in location for location, _ in shards)
    hint = ". `python scripts/make_world.py` makes the demo's in data/demo" if demo else ""
    return f"data.shards: none of the shards holds a sample. {shown}{more}{hint}"


def _findings(index: ShardIndex, number: int, lost: int) -> list[Finding]:
    shard, location, found = index.shards[number], index.locations[number], []
    if shard.flaw is not None or not shard.count:
        loss = "nothing tells how many" if lost >= _UNKNOWN else f"about {lost}"
        reason = f"{shard.flaw or 'no samples'}; {loss} samples are lost"
        found.append(Finding(-1, location, "", _kind(shard), reason, None))
    if shard.duplicates:
        repeated = [key for key, times in Counter(index.keys(number)).items() if times > 1]
        reason = f"keys that come more than once, every time as a sample: {', '.join(repeated[:_SHOWN])}, ..."
        found.append(Finding(-1, location, "", "duplicate_keys", reason, None))
    return found


def _kind(shard: Shard) -> str:
    if shard.state[0] < 0:
        return "missing_shards"
    return "empty_shards" if not shard.count else "truncated_shards"


def _usual_count(index: ShardIndex) -> int:
    """The median of the shards that were listed to their end. Where there is none, that loses everything."""
    whole = [shard.count for shard in index.shards if shard.count and shard.flaw in (None, UNTERMINATED)]
    return int(np.median(whole)) if whole else _UNKNOWN


def _expected(shard: Shard, location: str, usual: int) -> int:
    if shard.flaw is None and shard.count:
        return shard.count
    if not is_remote(location):
        stated = Path(location).with_name(f"{Path(location).stem}_stats.json")
        if stated.is_file():
            return int(json.loads(stated.read_text()).get("successes", usual))
    return usual


def _cut_samples(index: ShardIndex, number: int) -> int:
    """Samples known to the index that reach beyond the file's present end."""
    shard = index.shards[number]
    if shard.state[0] >= shard.bytes:
        return 0
    records = index.records_of(number)
    ends = np.max([records[f"{role}_offset"] + records[f"{role}_size"] for role in ROLES], axis=0)
    return int((ends.astype(np.int64) > shard.state[0]).sum())
