"""The settings of a lab: a YAML file of conf/lab, or one of the user's."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from clipzoo import io
from clipzoo.config.groups import CONF
from clipzoo.config.schema import kind_of
from clipzoo.config.vocabulary import Ascending, Count, Probability, Range, Seed, Share
from clipzoo.errors import ConfigError
from clipzoo.example_data.demo_world.enumerated import CaptionSettings, EnumeratedWorld
from clipzoo.types import checked

SCALES = "scales"
"""Key that a lab may leave out: overrides by name, with each of which every method is trained."""
CLAIM = ("says", "source", "better", "than", "comparison", "metric")
METRICS = ("accuracy", "zero_shot", "image_to_text", "text_to_image", "rank_correlation", "error", "calibrated_error")
"""Metrics of which a claim can say that one method is better."""


KINDS = {
    "title": "str", "baseline": "str", "seeds": "Count", "evaluations": "Count", "search": "dict",
    "training": "list[str]", "ranges": "list[str]", "worlds": "dict[str, dict]", "towers": "dict[str, list[str]]",
    "methods": "dict[str, list[str]]", "comparisons": "list[dict]", "claims": "list[dict]", "notes": "list[str]",
}  # fmt: skip
"""Annotations of the keys of a lab."""


@checked
@dataclass(frozen=True)
class WorldSettings:
    """A world and its splits.

    shapes, colours: numbers of them. image_size: side in pixels. train: number of training pairs.
    validation, test: images of each scene in these splits, whose scenes are equally frequent. seed: of all pictures.
    several, partial, openings, popularity, unmatched: see `CaptionSettings`.
    """

    shapes: Annotated[int, Range(at_least=2, at_most=10)]
    colours: Annotated[int, Range(at_least=2, at_most=10)]
    image_size: Count
    train: Count
    validation: Count
    test: Count
    seed: Seed
    several: Probability
    partial: Probability
    openings: Annotated[int, Range(at_least=1, at_most=4)]
    popularity: Annotated[float, Range(at_least=0, at_most=3)]
    unmatched: Probability

    @property
    def enumerated(self) -> EnumeratedWorld:
        captions = {field.name: getattr(self, field.name) for field in fields(CaptionSettings)}
        return EnumeratedWorld(self.shapes, self.colours, CaptionSettings(**captions))


@checked
@dataclass(frozen=True)
class SearchSettings:
    """The budget of every method: `trials` points of its ranges.

    rungs, keep, seed: as `search.rungs`, `search.keep` and `search.seed` of a configuration.
    """

    trials: Count
    rungs: Annotated[list[Annotated[float, Range(above=0, below=1)]], Ascending()]
    keep: Share
    seed: Seed


@dataclass(frozen=True)
class Comparison:
    """Methods that are compared on one world with one pair of towers. methods: their overrides by name."""

    name: str
    world_name: str
    tower: str
    world: WorldSettings
    methods: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class LabSettings:
    """A lab.

    name: of the file. baseline: method from which the others' differences are measured. seeds: fresh seeds of every
    winner. evaluations: evenly spaced evaluations on the validation split during a training. claims: of the papers, see
    `_claim`. notes: paragraphs of the page. scales: names of those of every method, for the power laws of the page.
    trust: packages whose classes the methods may name; from the command line alone.
    """

    name: str
    title: str
    baseline: str
    seeds: int
    evaluations: int
    search: SearchSettings
    comparisons: tuple[Comparison, ...]
    claims: tuple[Mapping[str, str], ...]
    notes: tuple[str, ...]
    scales: tuple[str, ...] = ()
    trust: tuple[str, ...] = ()

    @property
    def said(self) -> dict[str, object]:
        """Settings that change the page alone: no training depends on them."""
        return {
            "title": self.title, "baseline": self.baseline, "claims": list(self.claims), "notes": list(self.notes),
            "scales": list(self.scales), "rungs": list(self.search.rungs),
        }  # fmt: skip

    def chosen(self, methods: Sequence[str], comparisons: Sequence[str], seeds: int | None) -> LabSettings:
        """Return the lab of some methods and comparisons alone; empty lists for all. Raises ConfigError."""
        known = list(dict.fromkeys(name for part in self.comparisons for name in part.methods))
        _require_known("method", methods, known)
        _require_known("comparison", comparisons, [part.name for part in self.comparisons])
        parts = [
            replace(
                part, methods={name: lines for name, lines in part.methods.items() if not methods or name in methods}
            )
            for part in self.comparisons
            if not comparisons or part.name in comparisons
        ]
        return replace(self, comparisons=tuple(part for part in parts if part.methods), seeds=seeds or self.seeds)


def read_settings(name: str) -> LabSettings:
    """Read the lab of a name in conf/lab, or of the path of a YAML file. Raises ConfigError."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else CONF / "lab" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in (CONF / "lab").glob("*.yaml")))
        raise ConfigError(f"there is no lab {name}: give a YAML file, or one of {known}")
    content = io.read_yaml(path)
    if missing := [key for key in KINDS if key not in content]:
        raise io.DamagedFileError(path, f"lacks {', '.join(missing)}")
    for key, value in content.items():
        if key not in KINDS and key != SCALES:
            raise ConfigError(f"{path} has the unknown key {key}; its keys are {', '.join(KINDS)}, {SCALES}")
        kind = kind_of(ast.Constant(KINDS.get(key, "dict[str, list[str]]")))
        if not kind.admits(value):
            raise ConfigError(f"{path}: {key} must be {kind.words}, not {value!r:.80}")
    parts = tuple(_comparison(path, content, node) for node in content["comparisons"])
    search = _built(SearchSettings, content["search"], f"{path}: search")
    if any(abs(place - round(place)) > 1e-9 for place in (rung * content["evaluations"] for rung in search.rungs)):
        raise ConfigError(f"{path}: search.rungs={search.rungs} must be multiples of 1 / evaluations")
    return LabSettings(
        path.stem, content["title"], content["baseline"], content["seeds"], content["evaluations"], search, parts,
        tuple(_claim(path, node, parts) for node in content["claims"]), tuple(map(str, content["notes"])),
        tuple(content.get(SCALES) or ()),
    )  # fmt: skip


def _comparison(path: Path, content: Mapping[str, Any], node: Any) -> Comparison:
    io.require_fields(path, node, {"world": str, "tower": str, **({"methods": list} if "methods" in node else {})})
    for kind in ("world", "tower"):
        _require_known(kind, [node[kind]], list(content[f"{kind}s"]))
    names = node.get("methods") or list(content["methods"])
    _require_known("method", names, list(content["methods"]))
    shared = [*content["towers"][node["tower"]], *content["training"]]
    methods = {
        f"{name}, {scale}" if scale else name: _lines([*shared, *content["ranges"]], content["methods"][name], own)
        for name in names
        for scale, own in (content.get(SCALES) or {"": []}).items()
    }
    world = _built(WorldSettings, content["worlds"][node["world"]], f"{path}: worlds.{node['world']}")
    return Comparison(f"{node['world']}-{node['tower']}", node["world"], node["tower"], world, methods)


def _claim(path: Path, node: Any, parts: Sequence[Comparison]) -> Mapping[str, str]:
    """Return a claim: `says` that method `better` has a better `metric` than method `than` in `comparison`."""
    io.require_fields(path, node, dict.fromkeys(CLAIM, str))
    _require_known("comparison", [node["comparison"]], [part.name for part in parts])
    methods = next(part.methods for part in parts if part.name == node["comparison"])
    _require_known("method", [node["better"], node["than"]], list(methods))
    _require_known("metric", [node["metric"]], METRICS)
    return dict(node)


def _lines(*parts: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides of a method: those of later parts replace earlier ones of the same key."""
    merged: dict[str, str] = {}
    for line in (line for part in parts for line in part):
        merged.pop(key := line.partition("=")[0], None)
        merged[key] = line
    return tuple(merged.values())


def _built(kind: type, values: Any, place: str) -> Any:
    names = [field.name for field in fields(kind)]
    if not isinstance(values, dict) or set(values) != set(names):
        raise ConfigError(f"{place} must have the keys {', '.join(names)}")
    return kind(**values)


def _require_known(kind: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no {kind} {name} in this lab: give one of {', '.join(known)}")


def facts(comparison: Comparison, method: str, search: SearchSettings, evaluations: int) -> dict[str, Any]:
    """Return all settings on which the trainings of a method depend."""
    return {
        "world": asdict(comparison.world), "overrides": list(comparison.methods[method]), "search": asdict(search),
        "evaluations": evaluations,
    }  # fmt: skip
