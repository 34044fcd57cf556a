"""The constructors' annotations are the schema of the configuration.

`faults(config)` compares every `_target_` node with the arguments of the class it names: unknown keys, missing values,
wrong types. Classes of this package are read from their source, not imported: a mistyped key is found in a tenth of a
second, before torch is loaded.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}


@dataclass(frozen=True)
class Argument:
    """One constructor argument: its annotation, None where there is none, and whether it may be left out."""

    annotation: ast.expr | None
    optional: bool


def faults(config: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """What is wrong in a resolved configuration, a sentence each, with the key and the nearest valid one."""
    if "_target_" in config:
        yield from _target_faults(config, path)
    for key, value in config.items():
        inner = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            yield from faults(value, inner)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, Mapping):
                    yield from faults(item, f"{inner}[{index}]")


def nearest(key: str, known: list[str]) -> str:
    """The words "did you mean" with the nearest known key, or nothing."""
    tail = {each.rsplit(".", 1)[-1]: each for each in reversed(known)}
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not close:
        close = [tail[name] for name in difflib.get_close_matches(key.rsplit(".", 1)[-1], list(tail), n=1, cutoff=0.6)]
    return f"; did you mean {close[0]}?" if close else ""


def _target_faults(config: Mapping[str, Any], path: str) -> Iterator[str]:
    target = config["_target_"]
    try:
        arguments = constructor_arguments(target)
    except (LookupError, ImportError) as error:
        yield f"{path}._target_={target}: {error}"
        return
    given = {key: value for key, value in config.items() if key not in HYDRA_KEYS}
    for key, value in given.items():
        if key not in arguments:
            name = target.rsplit(".", 1)[-1]
            yield f"{path}.{key}: {name} has no such argument{nearest(key, list(arguments))}"
            continue
        annotation = arguments[key].annotation
        if annotation is not None and not _fits(value, annotation):
            chosen = isinstance(value, str) and PACKAGE.parent.joinpath("conf", *path.split("."), key).is_dir()
            remedy = f": choose it with {path.replace('.', '/')}/{key}={value}" if chosen else ""
            yield f"{path}.{key} must be {_in_words(annotation)}, not {value!r} ({type(value).__name__}){remedy}"
    for key, argument in arguments.items():
        if key not in given and not argument.optional and "_partial_" not in config:
            yield f"{path}.{key} is missing: {target.rsplit('.', 1)[-1]} needs it"


def constructor_arguments(target: str) -> dict[str, Argument]:
    """The arguments of the class or function with the dotted name `target`."""
    module, _, name = target.rpartition(".")
    source = _source(module)
    if source is not None:
        return _from_source(ast.parse(source.read_text()), name, target)
    return _from_import(module, name)


def _source(module: str) -> Path | None:
    """The file of one of this package's modules, without importing it."""
    parts = module.split(".")
    if parts[0] != PACKAGE.name:
        return None
    stem = PACKAGE.joinpath(*parts[1:])
    for candidate in (stem.with_suffix(".py"), stem / "__init__.py"):
        if candidate.exists():
            return candidate
    raise LookupError(f"there is no module {module}")


def _from_source(tree: ast.Module, name: str, target: str) -> dict[str, Argument]:
    definitions = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    if name not in definitions:
        raise LookupError(f"{target.rpartition('.')[0]} defines no {name}{nearest(name, list(definitions))}")
    node = definitions[name]
    if isinstance(node, ast.FunctionDef):
        return _signature(node.args, skip=0)
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return _signature(item.args, skip=1)
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        return {ast.unparse(item.target): Argument(item.annotation, item.value is not None) for item in fields}
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in definitions:
            return _from_source(tree, base.id, target)
    return {}


def _signature(arguments: ast.arguments, skip: int) -> dict[str, Argument]:
    positional = arguments.args[skip:]
    first_default = len(positional) - len(arguments.defaults)
    found = {each.arg: Argument(each.annotation, index >= first_default) for index, each in enumerate(positional)}
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found[each.arg] = Argument(each.annotation, default is not None)
    return found


def _from_import(module: str, name: str) -> dict[str, Argument]:
    """A class of the user's own package has to be imported to be known."""
    target = getattr(importlib.import_module(module), name, None)
    if target is None:
        raise LookupError(f"{module} defines no {name}")
    found = {}
    for each in inspect.signature(target).parameters.values():
        text = each.annotation if isinstance(each.annotation, str) else getattr(each.annotation, "__name__", None)
        known = text is not None and each.annotation is not inspect.Parameter.empty
        annotation = ast.parse(text, mode="eval").body if known and text else None
        found[each.name] = Argument(annotation, each.default is not inspect.Parameter.empty)
    return found


def _in_words(annotation: ast.expr) -> str:
    """The annotation as who writes YAML would say it."""
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return f"{_in_words(left)} or {_in_words(right)}"
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            options = choices.elts if isinstance(choices, ast.Tuple) else [choices]
            return " or ".join(str(each.value) for each in options if isinstance(each, ast.Constant))
        case ast.Constant(value=None):
            return "null"
        case ast.Name(id="Positive"):
            return "a number above 0"
        case ast.Name(id="Count"):
            return "a whole number of at least 1"
    return ast.unparse(annotation)


def _fits(value: Any, annotation: ast.expr) -> bool:
    """Whether a plain YAML value is of the annotated type. A class that YAML cannot write must be a `_target_` node."""
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _fits(value, left) or _fits(value, right)
        case ast.Constant(value=None):
            return value is None
        case ast.Constant(value=str() as text):
            return _fits(value, ast.parse(text, mode="eval").body)
        case ast.Name(id="Any"):
            return True
        case ast.Name(id="bool"):
            return isinstance(value, bool)
        case ast.Name(id="int"):
            return isinstance(value, int) and not isinstance(value, bool)
        case ast.Name(id="Positive" | "Count" as name):
            whole = "int" if name == "Count" else "float"
            return _fits(value, ast.Name(id=whole)) and value > 0
        case ast.Name(id="float"):
            return isinstance(value, int | float) and not isinstance(value, bool)
        case ast.Name(id="str" | "Path"):
            return isinstance(value, str)
        case ast.Name(id="list" | "tuple" | "Sequence"):
            return isinstance(value, list)
        case ast.Name(id="dict" | "Mapping"):
            return isinstance(value, Mapping)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            options = choices.elts if isinstance(choices, ast.Tuple) else [choices]
            constants = [each.value for each in options if isinstance(each, ast.Constant)]
            return any(value == each and type(value) is type(each) for each in constants)
        case ast.Subscript(value=ast.Name(id="list" | "Sequence"), slice=inner):
            return isinstance(value, list) and all(_fits(each, inner) for each in value)
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=inners)):
            return (
                isinstance(value, list)
                and len(value) == len(inners)
                and all(_fits(each, inner) for each, inner in zip(value, inners, strict=True))
            )
        case ast.Subscript(value=ast.Name(id="dict" | "Mapping"), slice=ast.Tuple(elts=[_, inner])):
            return isinstance(value, Mapping) and all(_fits(each, inner) for each in value.values())
    return isinstance(value, Mapping) and "_target_" in value
