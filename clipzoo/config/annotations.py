"""Constructor annotations as checks of plain YAML values."""

from __future__ import annotations

import ast
import builtins
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class UncheckableError(LookupError):
    """YAML values cannot be checked against this annotation."""


@dataclass(frozen=True)
class Kind:
    """The values that an annotation admits. words: the annotation as a message names it."""

    words: str
    admits: Callable[[Any], bool]


def kind_of(annotation: ast.expr) -> Kind:
    """Return the kind of values that an annotation admits.

    A class that YAML cannot write, such as `Kernel`, admits a mapping with `_target_`.

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
            return _SIMPLE.get(name) or _instance(annotation, name)
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inner):
            parameters = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return _subscript(ast.unparse(annotation), name, parameters)
    raise UncheckableError(ast.unparse(annotation))


def _subscript(words: str, name: str, parameters: list[ast.expr]) -> Kind:
    if name == "Literal":
        constants = [ast.literal_eval(parameter) for parameter in parameters]
        options = [(type(constant), constant) for constant in constants]
        return Kind(" or ".join(map(str, constants)), lambda value: (type(value), value) in options)
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
            return Kind(words, lambda value: isinstance(value, list) and all(map(kind.admits, value)))
        case "tuple", _:
            return Kind(words, lambda value: isinstance(value, list) and _pairwise(kinds, value))
        case "dict" | "Mapping", [_, kind]:
            return Kind(words, lambda value: isinstance(value, Mapping) and all(map(kind.admits, value.values())))
    raise UncheckableError(words)


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
    return isinstance(value, Mapping) and "_target_" in value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_whole(value)


_SIMPLE = {
    "Any": Kind("any value", lambda value: True),
    "None": Kind("null", lambda value: value is None),
    "bool": Kind("bool", lambda value: isinstance(value, bool)),
    "int": Kind("int", _is_whole),
    "float": Kind("float", _is_number),
    "Count": Kind("a whole number of at least 1", lambda value: _is_whole(value) and value > 0),
    "Positive": Kind("a number above 0", lambda value: _is_number(value) and value > 0),
    "Callable": Kind("Callable", _is_node),
    **{name: Kind(name, lambda value: isinstance(value, str)) for name in ("str", "Path")},
    **{name: Kind(name, lambda value: isinstance(value, list)) for name in ("list", "tuple", "Sequence")},
    **{name: Kind(name, lambda value: isinstance(value, Mapping)) for name in ("dict", "Mapping")},
}
