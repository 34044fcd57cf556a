"""Compare two records of record.py bit for bit.

python tests/unchanged/compare.py REFERENCE/record.json CURRENT/record.json

Prints the first difference of every part of every case and exits with 1 when there is any. Cases that only one record
has are counted; with --complete a case that is missing in the current record is a difference.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ABSENT = "(absent)"
MESSAGES = "message"
"""Texts of errors may be reworded: they are shown, not counted."""
DESCRIPTION = "about."
"""Prefix of configuration keys that describe an experiment and affect nothing."""


@dataclass
class Comparison:
    """differences: lines for the reader. notes: what differs without being a difference of results."""

    cases: int = 0
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path)
    parser.add_argument("current", type=Path)
    parser.add_argument("--complete", action="store_true", help="missing cases are differences")
    options = parser.parse_args()
    reference, current = (json.loads(path.read_text()) for path in (options.reference, options.current))
    comparison = compare(reference, current, options.complete)
    for line in [*(f"note: {note}" for note in comparison.notes), *comparison.differences]:
        print(line)
    print(f"{comparison.cases} cases compared, {len(comparison.differences)} differences")
    return int(bool(comparison.differences))


def compare(reference: Mapping[str, Any], current: Mapping[str, Any], complete: bool = False) -> Comparison:
    """Compare the cases of both records; class names of the reference are translated by the current record's names."""
    comparison = Comparison()
    names = current["renamed"]
    expected, actual = reference["cases"], current["cases"]
    for fact in ("inputs", "environment"):
        if reference[fact] != current[fact]:
            comparison.notes.append(f"recorded with different {fact}: {reference[fact]} -> {current[fact]}")
    for key in sorted(expected.keys() & actual.keys()):
        comparison.cases += 1
        lines = differences(key, _translated(expected[key], names), actual[key])
        for line in lines:
            (comparison.notes if line.startswith(f"{key}: {MESSAGES}: ") else comparison.differences).append(line)
    missing = sorted(expected.keys() - actual.keys())
    if complete:
        comparison.differences += [f"{key}: missing in the current record" for key in missing]
    else:
        comparison.notes += _counted(missing, "not in the current record")
    comparison.notes += _counted(sorted(actual.keys() - expected.keys()), "not in the reference")
    return comparison


def differences(key: str, expected: Any, actual: Any) -> Iterator[str]:
    """A line on the first different value of each field (exit, logged, checkpoint, ...) and the number of others."""
    by_field: dict[str, list[tuple[str, Any, Any]]] = {}
    for path, old, new in _different(expected, actual):
        parts = [part for part in path if not isinstance(part, int)] or ["value"]
        name = parts[1] if parts[0] == "runs" and len(parts) > 1 else parts[0]
        by_field.setdefault(name, []).append((" ".join(parts), old, new))
    for values in by_field.values():
        path, old, new = values[0]
        more = f" (and {len(values) - 1} more)" if len(values) > 1 else ""
        yield f"{key}: {path.removeprefix('runs ')}: {_shown(old)} -> {_shown(new)}{_distance(old, new)}{more}"


def _different(
    old: Any, new: Any, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Any, Any]]:
    """Path and both values of every difference, in the order of the reference."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            if key.startswith(DESCRIPTION):
                continue
            yield from _different(old.get(key, ABSENT), new.get(key, ABSENT), (*path, key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from _different(left, right, (*path, f"step {left['step']}" if _is_logged(left) else index))
    # repr: a float is equal to the last bit, and NaN equals NaN.
    elif repr(old) != repr(new):
        yield path, old, new


def _is_logged(value: Any) -> bool:
    return isinstance(value, dict) and "step" in value


def _translated(value: Any, names: Mapping[str, str]) -> Any:
    """Old class names replaced by new ones."""
    if isinstance(value, dict):
        return {key: _translated(inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [_translated(inner, names) for inner in value]
    return names.get(value, value) if isinstance(value, str) else value


def _distance(old: Any, new: Any) -> str:
    return f" (by {abs(new - old):.1e})" if isinstance(old, float) and isinstance(new, float) else ""


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, float) else str(value)
    return text if len(text) <= 160 else f"{text[:160]}..."


def _counted(keys: list[str], what: str) -> list[str]:
    """One line a part, with the keys where they are few."""
    parts = Counter(key.split("/")[0] for key in keys)
    few = f": {', '.join(keys)}" if 0 < len(keys) <= 5 else ""
    return [f"{what}: {', '.join(f'{count} of {part}' for part, count in parts.items())}{few}"] if keys else []


if __name__ == "__main__":
    sys.exit(main())
