"""Compare two records of record.py bit for bit.

python tests/unchanged/compare.py REFERENCE_FOLDER CURRENT_FOLDER [--parts runs,pages] [--complete]

Prints the first difference of every part of every case and exits with 1 when there is any. Cases that only one record
has are counted; with --complete a case that is missing in the current record is a difference. Names and outputs that
changed on purpose are listed in changed.py.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.unchanged import changed
from tests.unchanged.results import TIMINGS

ABSENT = "(absent)"
MESSAGES = "message"
"""Texts of errors may be reworded: they are shown, not counted."""
DESCRIPTION = "about."
"""Prefix of configuration keys that describe an experiment and affect nothing."""
VOLATILE = (
    (re.compile(r"\bclipzoo(?:\.\w+)*\.([A-Za-z]\w*)"), r"\1"),  # the module of a class
    (re.compile(r"(?<=-)[0-9a-f]{8}(?![0-9a-f])"), "DIGEST"),  # of a configuration, with the modules of its classes
    (re.compile(r"\b[0-9a-f]{40}\b|(?<=\| )[0-9a-f]{9}(?= \|)"), "REVISION"),
    (re.compile(r"\bclipzoo \d[\w.+]*"), "clipzoo VERSION"),
    (re.compile(r"(?<=\|TIME\|TIME\|TIME\| )[\d.]+"), "GIB"),  # the last column of a table of costs
    (re.compile(r"(?<=& )[\d.]+(?= & (finished|pruned) )"), "MINUTES"),  # in LaTeX, of a trial
    (re.compile(r"\b\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d)?)?"), "DATE"),
)
"""Pattern and replacement of what is no result in any text."""


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
    parser.add_argument("--parts", type=lambda text: text.split(","), help="comma-separated; default: all of both")
    parser.add_argument("--complete", action="store_true", help="missing cases are differences")
    options = parser.parse_args()
    recorded = [{path.stem for path in folder.glob("*.json")} for folder in (options.reference, options.current)]
    known = recorded[0] if options.complete else recorded[0] & recorded[1]
    count = cases = 0
    for part in options.parts or sorted(known):
        comparison = compare(read(options.reference, part), read(options.current, part), options.complete)
        for line in [*(f"note: {note}" for note in comparison.notes), *comparison.differences]:
            print(line)
        print(f"{part}: {comparison.cases} cases compared, {len(comparison.differences)} differences")
        count, cases = count + len(comparison.differences), cases + comparison.cases
    print(f"{cases} cases compared, {count} differences")
    return int(bool(count))


def read(folder: Path, part: str) -> dict[str, Any]:
    """The record of a part, without cases where there is none."""
    path = folder / f"{part}.json"
    return json.loads(path.read_text()) if path.exists() else {"cases": {}}


def compare(reference: Mapping[str, Any], current: Mapping[str, Any], complete: bool = False) -> Comparison:
    """Compare the cases of both records; the reference's names of keys and classes are translated."""
    comparison = Comparison()
    expected, actual = reference["cases"], current["cases"]
    for fact in ("inputs", "environment"):
        if reference.get(fact) != current.get(fact):
            comparison.notes.append(f"recorded with different {fact}: {reference.get(fact)} -> {current.get(fact)}")
    found = []
    for key in sorted(expected.keys() & actual.keys()):
        comparison.cases += 1
        found += differences(key, _normal(expected[key], old=True), _normal(actual[key]))
    missing = sorted(expected.keys() - actual.keys())
    if complete:
        found += [f"{key}: missing in the current record" for key in missing]
    else:
        comparison.notes += _counted(missing, "not in the current record")
    comparison.notes += _counted(sorted(actual.keys() - expected.keys()), "not in the reference")
    for line in found:
        reasons = [reason for pattern, reason in changed.OUTPUTS.items() if re.search(pattern, line)]
        if reasons:
            comparison.notes.append(f"changed on purpose, {reasons[0]}: {line}")
        else:
            (comparison.notes if f" {MESSAGES}: " in line else comparison.differences).append(line)
    return comparison


def differences(key: str, expected: Any, actual: Any) -> Iterator[str]:
    """A line on the first different value of each field (exit, logged, checkpoint, ...) and the number of others."""
    by_field: dict[str, list[tuple[str, Any, Any]]] = {}
    for path, old, new in _different(expected, actual):
        parts = [part for part in path if not isinstance(part, int)] or ["value"]
        name = parts[1] if parts[0] in ("runs", "pages") and len(parts) > 1 else parts[0]
        name = f"{name} {MESSAGES}" if parts[-1] == MESSAGES else name
        by_field.setdefault(name, []).append((" ".join(parts), old, new))
    for values in by_field.values():
        path, old, new = values[0]
        more = f" (and {len(values) - 1} more)" if len(values) > 1 else ""
        path = path.removeprefix("runs ").removeprefix("pages ")
        yield f"{key}: {path}: {_shown(old)} -> {_shown(new)}{_distance(old, new)}{more}"


def _different(
    old: Any, new: Any, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Any, Any]]:
    """Path and both values of every difference, in the order of the reference."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            if key.startswith(DESCRIPTION):
                continue
            yield from _different(old.get(key, ABSENT), new.get(key, ABSENT), (*path, key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and not _is_text([*old, *new]):
        for index, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from _different(left, right, (*path, f"step {left['step']}" if _is_logged(left) else index))
    elif _is_text(old) and _is_text(new):
        for kind, i, j, k, m in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            if kind != "equal":
                yield (*path, f"line {i + 1}"), "\n".join(old[i:j]) or ABSENT, "\n".join(new[k:m]) or ABSENT
    # repr: a float is equal to the last bit, and NaN equals NaN.
    elif repr(old) != repr(new):
        yield path, old, new


def _is_logged(value: Any) -> bool:
    return isinstance(value, dict) and "step" in value


def _is_text(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(line, str) for line in value)


def _normal(value: Any, old: bool = False) -> Any:
    """The value without what is volatile. old: it is the reference's and gets the new names of keys and classes."""
    if isinstance(value, dict):
        names = changed.KEYS if old else {}
        kept = {key: inner for key, inner in value.items() if key not in TIMINGS}
        return {names.get(key) or _normal(key): _normal(inner, old) for key, inner in kept.items()}
    if isinstance(value, list):
        return [_normal(inner, old) for inner in value]
    if isinstance(value, str):
        for pattern, replacement in VOLATILE:
            value = pattern.sub(replacement, value)
        if old:
            value = changed.CLASSES.get(value, value)
        # Pages of stored runs quote their commands.
        for key, name in changed.KEYS.items():
            value = value.replace(key, name)
    return value


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
