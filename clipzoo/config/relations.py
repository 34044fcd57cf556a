"""Relations between values of a configuration, such as "image_size % patch_size == 0".

A class states those of its constructor's arguments as `relations`, expression -> the sentence of the message, and
sizes that follow from the arguments as `derived`, name -> expression. Both are read from the source, without importing
the class. Dots lead into inner nodes: "image_width == image_tower.width".
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from clipzoo.config.constructors import class_constant
from clipzoo.config.from_model import is_open

RUN = {
    "head.image_width == encoder.image_width": "the head's width must be that of the encoder's features",
    "head.text_width == encoder.text_width": "the head's width must be that of the encoder's features",
    "head.image_points <= encoder.image_tower.tokens": "an image has no more points than the encoder has tokens",
    "data.image_size == encoder.image_tower.image_size": "images must have the size that the encoder takes",
    "data.tokenizer.context_length <= encoder.context_length": "captions must fit into the encoder's context",
    "trainer.patience is None or eval.every_epochs is not None": (
        "early stopping needs evaluations during the training: give eval.every_epochs"
    ),
    "optim.schedule.warmup_epochs <= trainer.epochs": "the warmup must end within the training",
    "trainer.parallel == 'ddp' or optim.takes_shards": (
        "this optimizer cannot update weights that ranks divide: choose another one, or trainer.parallel=ddp"
    ),
}
"""Relations between the groups of a run."""


def at_most(value: float, bound: float) -> bool:
    """Return True if value <= bound, or if rounding explains the difference: 1 / (1 / 14.3) exceeds 14.3."""
    return value <= bound or math.isclose(value, bound, rel_tol=1e-6)


FUNCTIONS: dict[str, Callable[..., Any]] = {"sum": sum, "len": len, "min": min, "max": max, "at_most": at_most}
"""Functions that an expression may call."""


def broken(relations: Mapping[str, str], values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield a sentence for every relation that does not hold.

    A relation holds if one of its values is missing, null or of a wrong type: the value's annotation reports that.
    It also holds if a value is found in the model: the relation is checked again once that is known.
    """
    for expression, sentence in relations.items():
        try:
            seen = {name: evaluate(name, values) for name in _names(expression)}
            if any(map(is_open, seen.values())) or (None in seen.values() and " None" not in expression):
                continue
            holds = evaluate(expression, values)
        except (LookupError, NameError, AttributeError, TypeError, ZeroDivisionError):
            continue
        if not holds:
            yield f"{', '.join(f'{path}{name}={value}' for name, value in seen.items())}: {sentence}"


def evaluate(expression: str, values: Mapping[str, Any]) -> Any:
    """Return the value of an expression over the values of a node."""
    return eval(expression, {"__builtins__": {}, **FUNCTIONS}, _Locals(values))


class _Locals(dict[str, Any]):
    """The values of a node by name, with those that its class derives."""

    def __getitem__(self, name: str) -> Any:
        return _value(self, name)


class _Node:
    """An inner node, whose values are attributes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        return _value(self._values, name)


def _value(values: Mapping[str, Any], name: str) -> Any:
    """Return a value of a node, a size that its class derives from the values, or a constant of the class."""
    if name in values:
        value = values.get(name)
        return _Node(value) if isinstance(value, Mapping) else value
    target = values.get("_target_")
    if not isinstance(target, str):
        raise KeyError(name)
    derived = class_constant(target, "derived") or {}
    constant = evaluate(derived[name], values) if name in derived else class_constant(target, name)
    if constant is None:
        raise KeyError(name)
    return constant


def _names(expression: str) -> list[str]:
    """Return the dotted names in an expression."""
    tree = ast.parse(expression, mode="eval")
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)]
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    outer = sorted((node for node in nodes if id(node) not in inner), key=lambda node: node.col_offset)
    names = [ast.unparse(node) for node in outer]
    return [name for name in dict.fromkeys(names) if name not in FUNCTIONS]
