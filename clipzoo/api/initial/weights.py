"""The weights that a run starts from, and the table of what became of each tensor."""

from __future__ import annotations

import csv
import io as text_io
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor

from clipzoo import io
from clipzoo.api.initial.heads import fill_head, fill_objective, is_of_head
from clipzoo.api.initial.sources import Source, read_source
from clipzoo.api.open_clip.settings import with_plain_towers
from clipzoo.config.from_model import is_open
from clipzoo.encoders.base import Tower
from clipzoo.encoders.weights.matching import HINTS, Row, common_prefix, fill_tower, shown
from clipzoo.errors import ConfigError, number_of
from clipzoo.io.weights import RANDOM, REGISTRIES
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.types import Part, checked

TABLE = "init.csv"
TOWERS = ("image", "text")
PARTS = (*TOWERS, "head")
SAME = {
    "image": ("mean", "std", "image_tower.heads", "image_tower.quick_gelu"),
    "text": (
        "tokenizer._target_", "text_tower.vocabulary", "text_tower.end_token", "text_tower.heads",
        "text_tower.quick_gelu", "text_tower.norm_eps",
    ),
}  # fmt: skip
"""Settings of the encoder that no shape shows and that trained weights depend on."""


@checked
class InitialWeights(Part):
    """Weights of the first step.

    weights: source for the whole model: a run directory, one of its checkpoints, a .safetensors file, an exported
        folder, "open_clip:NAME/TAG", "timm" or "huggingface" (those of the encoder's name, or "timm:NAME").
    image, text, head: source for one part, in place of `weights`; "random" keeps the values of the seed. The
        objective's learned scale and bias come with the head.
    leave_out: patterns of names of tensors that the run does not use, such as "logit_bias"; all others are used, or
        the run does not start.
    digests: SHA-256 of the weights, by argument; set when the configuration is checked.
    resume: a run, or one of its checkpoints, whose training the run continues; see `clipzoo.api.initial.resume`.
    """

    def __init__(
        self,
        weights: str | None,
        image: str | None,
        text: str | None,
        head: str | None,
        leave_out: list[str],
        digests: dict[str, str] | None = None,
        resume: str | None = None,
    ) -> None:
        given = {"image": image, "text": text, "head": head}
        self._sources = {
            part: (f"init.{part if name else 'weights'}", name or weights)
            for part, name in given.items()
            if (name or weights) not in (None, RANDOM)
        }
        self._leave_out = leave_out

    def load(
        self,
        model: Model,
        config: Mapping[str, Any],
        trust: Collection[str] = (),
        objective: Objective | None = None,
    ) -> list[Row]:
        """Fill the model, built from `config`, and its objective in place, and return what became of each tensor.

        Raises:
            ConfigError: weights are missing or do not fit, see `fill_tower` and `fill_head`; or the source has weights
                that are not used and not in `leave_out`.
        """
        sources: dict[str, Source] = {}
        filled: dict[str, dict[str, list[Row]]] = {}
        for part, (key, name) in self._sources.items():
            assert name is not None
            tower = getattr(model.encoder, f"{part}_tower", None)
            # "timm" alone means the weights of this tower.
            shared = part if name in REGISTRIES else name
            place = f"{key}={name}"
            if part in TOWERS and tower is None:
                raise ConfigError(f"{place}: {type(model.encoder).__name__} has no attribute {part}_tower to fill")
            if shared not in sources:
                sources[shared], filled[shared] = read_source(name, key, tower, trust), {}
            source = sources[shared]
            state = {name: value for name, value in source.state.items() if not self._leaves_out(name)}
            if part in TOWERS:
                _require_same_settings(part, source.config, config, place)
                assert tower is not None
                text = with_plain_towers(config["encoder"])["text_tower"]
                vocabulary = text.get("vocabulary") if isinstance(text, Mapping) else None
                rows = fill_tower(part, tower, state, place, vocabulary)  # type: ignore[arg-type]
            else:
                rows = fill_head(model.head, state, place, is_required=key == "init.head")
                rows += [] if objective is None else fill_objective(objective, state)
            filled[shared][part] = rows
        rows = [row for parts in filled.values() for rows in parts.values() for row in rows]
        unused = [
            name
            for shared, source in sources.items()
            for name in _unused(source.state, filled[shared], model)
            if not self._leaves_out(name)
        ]
        if unused:
            patterns = ",".join(_patterns(unused, {row.source for row in rows}))
            given = " ".join(f"{key}={name}" for key, name in dict.fromkeys(self._sources.values()))
            raise ConfigError(
                f"{given} has tensors that this model does not use: {shown(unused)}. Choose the encoder, head or "
                f"objective that has them, or give 'init.leave_out=[{patterns}]'"
            )
        return rows + _left_out(rows, [source.state for source in sources.values()])

    def _leaves_out(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._leave_out)


def summary(rows: Sequence[Row]) -> str:
    """Return one line: how many tensors of each part are loaded, resized or kept."""
    parts = []
    for part in ("image", "text", "head", "objective"):
        counts = Counter(row.outcome for row in rows if row.part == part)
        if counts:
            parts.append(f"{part}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}")
    left_out = sum(row.outcome == "left out" for row in rows)
    return (
        "initial weights: "
        + "; ".join(parts)
        + (f"; {number_of(left_out, 'tensor')} of the source left out" if left_out else "")
    )


def write_table(rows: Sequence[Row], folder: Path) -> None:
    """Write <folder>/init.csv, one line for each tensor of the model and each unused tensor of the source."""
    text = text_io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["part", "outcome", "tensor", "shape", "source", "source_shape"])
    for row in rows:
        table.writerow([row.part, row.outcome, row.tensor, _shape(row.shape), row.source, _shape(row.source_shape)])
    io.write_whole(folder / TABLE, text.getvalue())


def _require_same_settings(part: str, source: Mapping[str, Any] | None, config: Mapping[str, Any], place: str) -> None:
    if source is None:
        return
    source_encoder, encoder = with_plain_towers(source["encoder"]), with_plain_towers(config["encoder"])
    for key in SAME[part]:
        theirs, ours = _value(source_encoder, key), _value(encoder, key)
        if None not in (theirs, ours) and theirs != ours:
            raise ConfigError(
                f"{place} was trained with encoder.{key}={theirs}, this run has {ours}: give encoder.{key}={theirs}"
            )


def _value(node: Any, key: str) -> Any:
    """Return a value of a node by its dotted key; None if it is missing or is found in the model."""
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return None if is_open(node) else node


def _unused(state: Mapping[str, Tensor], filled: Mapping[str, Sequence[Row]], model: Model) -> list[str]:
    """Return the names of weights that a source has for the parts that it fills, and that none of them uses.

    Integers are no weights. A source that fills one tower may have another one, under another prefix.
    """
    used = {row.source for rows in filled.values() for row in rows}
    prefixes = tuple(
        common_prefix(row.source for row in filled[part] if row.source) for part in TOWERS if part in filled
    )
    others = {hint for part in TOWERS if part not in filled for hint in HINTS[part]}
    towers = [getattr(model.encoder, f"{part}_tower") for part in TOWERS if part in filled]
    ignored = {name for tower in towers if isinstance(tower, Tower) for name in tower.left_out}

    def is_needed(name: str) -> bool:
        if is_of_head(name, state):
            return "head" in filled
        if len(filled) == len(PARTS):
            return True
        return name.startswith(prefixes) and not any(hint in name for hint in others)

    return [
        name
        for name, value in state.items()
        if name not in used and value.is_floating_point() and not ignored & {*name.split(".")} and is_needed(name)
    ]


def _patterns(unused: Sequence[str], used: Collection[str]) -> list[str]:
    """Return the shortest patterns of names that match all unused tensors and no used one."""
    patterns: dict[str, None] = {}
    for name in unused:
        parts = name.split(".")
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
        inner = next((one for one in prefixes if not any(other.startswith(f"{one}.") for other in used)), None)
        patterns[name if inner is None else f"{inner}.*"] = None
    return list(patterns)


def _left_out(rows: Sequence[Row], states: Sequence[Mapping[str, Tensor]]) -> list[Row]:
    used = {row.source for row in rows}
    return [
        Row("", "left out", source=name, source_shape=tuple(value.shape))
        for state in states
        for name, value in state.items()
        if name not in used
    ]


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
