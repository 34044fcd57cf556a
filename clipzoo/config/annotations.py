"""Constructor annotations as checks of plain YAML values."""

from __future__ import annotations

import ast
import builtins
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from clipzoo.config import vocabulary
from clipzoo.config.vocabulary import NonFinite

FLOAT32_MAX = 3.4028234663852886e38
INT64_MAX = 2**63 - 1
PLAIN = (bool, int, float, str, list, tuple, Mapping, type(None))
"""Types of the values that YAML can write."""


class UncheckableError(LookupError):
    """YAML values cannot be checked against this annotation."""


@dataclass(frozen=True)
class Kind:
    """The values that an annotation admits. words: the annotation as a message names it."""

    words: str
    admits: Callable[[Any], bool]


def kind_of(annotation: ast.expr) -> Kind:
    """Return the kind of values that an annotation admits.

    A class that YAML cannot write, such as `Kernel`, admits a mapping with `_target_`, and objects in Python.

    Raises:
        UncheckableError: the annotation is none of the forms below.
    """
    match annotation:
        case ast.Constant(value=None):
            return _SIMPLE["None"]
        case ast.Constant(value=str() as text):
            return kind_of(ast.parse(text, mode="eval").body)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _either(kind_of(left), kind_of(right))
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return _SIMPLE.get(name) or _of_vocabulary(name) or _instance(annotation, name)
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inner):
            parameters = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return _subscript(ast.unparse(annotation), name, parameters)
    raise UncheckableError(ast.unparse(annotation))


def kind_of_object(annotation: Any) -> Kind:
    """Return the kind of an annotation that is given as an object, such as `vocabulary.Count`."""
    return kind_of(ast.parse(repr(annotation), mode="eval").body)


def _of_vocabulary(name: str) -> Kind | None:
    annotation = getattr(vocabulary, name, None)
    return None if typing.get_origin(annotation) is None else kind_of_object(annotation)


def _subscript(words: str, name: str, parameters: list[ast.expr]) -> Kind:
    if name == "Literal":
        constants = [ast.literal_eval(parameter) for parameter in parameters]
        options = [(type(constant), constant) for constant in constants]
        return Kind(" or ".join(map(str, constants)), lambda value: (type(value), value) in options)
    if name == "Annotated":
        return _constrained(parameters[0], parameters[1:])
    if name == "Callable":
        return Kind(words, _is_node)
    if name == "tuple" and isinstance(last := parameters[-1], ast.Constant) and last.value is ...:
        name, parameters = "list", parameters[:1]
    kinds = [kind_of(parameter) for parameter in parameters]
    match name, kinds:
        case "Optional", [kind]:
            return _either(kind, _SIMPLE["None"])
        case "Union", _:
            return _either(*kinds)
        case "list" | "Sequence", [kind]:
            return Kind(
                f"a list, every value {kind.words}", lambda value: _is_list(value) and all(map(kind.admits, value))
            )
        case "tuple", _:
            distinct = list(dict.fromkeys(kind.words for kind in kinds))
            values = f"every value {distinct[0]}" if len(distinct) == 1 else ", ".join(kind.words for kind in kinds)
            return Kind(f"a list of {len(kinds)}, {values}", lambda value: _is_list(value) and _pairwise(kinds, value))
        case "dict" | "Mapping", [key, kind]:
            return Kind(
                words,
                lambda value: (
                    isinstance(value, Mapping) and all(map(key.admits, value)) and all(map(kind.admits, value.values()))
                ),
            )
    raise UncheckableError(words)


def _constrained(base: ast.expr, constraints: list[ast.expr]) -> Kind:
    """The kind of Annotated[base, constraint, ...]; metadata that is not of the vocabulary is ignored."""
    kind = kind_of(base)
    for constraint in map(_constraint, constraints):
        if isinstance(constraint, NonFinite):
            kind = Kind("a number", _is_number)
        elif constraint is not None:
            noun = _NOUNS.get(ast.unparse(base), kind.words)
            kind = Kind(f"{noun} {constraint.words}", _both(kind.admits, constraint.admits))
    return kind


def _constraint(expression: ast.expr) -> Any:
    match expression:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=arguments, keywords=keywords):
            if name in ("Range", "MultipleOf", "Ascending", "Distinct", "NonFinite"):
                # Bounds are literals.
                given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in keywords if keyword.arg}
                return getattr(vocabulary, name)(*map(ast.literal_eval, arguments), **given)
    return None


def _both(first: Callable[[Any], bool], second: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: first(value) and second(value)


def _pairwise(kinds: list[Kind], values: list[Any]) -> bool:
    return len(kinds) == len(values) and all(kind.admits(value) for kind, value in zip(kinds, values, strict=True))


def _either(*kinds: Kind) -> Kind:
    return Kind(" or ".join(kind.words for kind in kinds), lambda value: any(kind.admits(value) for kind in kinds))


def _instance(annotation: ast.expr, name: str) -> Kind:
    """An instance of a class, which YAML describes by a `_target_` node."""
    if hasattr(builtins, name) or hasattr(typing, name):
        raise UncheckableError(ast.unparse(annotation))
    return Kind(ast.unparse(annotation), _is_node)


def _is_node(value: Any) -> bool:
    return isinstance(value, Mapping) and "_target_" in value or not isinstance(value, PLAIN)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -INT64_MAX <= value <= INT64_MAX


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_whole(value)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and -FLOAT32_MAX <= value <= FLOAT32_MAX


_NOUNS = {"int": "a whole number", "float": "a number"}
_SIMPLE = {
    "Any": Kind("any value", lambda value: True),
    "None": Kind("null", lambda value: value is None),
    "bool": Kind("bool", lambda value: isinstance(value, bool)),
    "int": Kind("a whole number", _is_whole),
    "float": Kind("a finite number", _is_finite),
    "Callable": Kind("Callable", _is_node),
    **{name: Kind(name, lambda value: isinstance(value, str | PurePath)) for name in ("str", "Path")},
    **{name: Kind(name, _is_list) for name in ("list", "tuple", "Sequence")},
    **{name: Kind(name, lambda value: isinstance(value, Mapping)) for name in ("dict", "Mapping")},
}
