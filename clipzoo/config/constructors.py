"""Constructor arguments and constants of the classes that a configuration names.

Modules of this package are parsed, not imported: torch takes seconds. Other packages' classes are imported.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from clipzoo.errors import nearest

PACKAGE = Path(__file__).resolve().parents[1]
ANY_KEY = "**"
"""The name under which a constructor's **kwargs stand among its arguments."""
_WITHOUT_ARGUMENTS = {"object", "ABC", "Protocol", "Generic", "Module", "Part"}
"""Bases whose constructors take no arguments."""


@dataclass(frozen=True)
class Argument:
    """A constructor argument. annotation: None if it has none. optional: it has a default.

    default: None where there is none, or where it is not in the source.
    """

    annotation: ast.expr | None
    optional: bool
    default: ast.expr | None = None


def constructor_arguments(target: str) -> dict[str, Argument]:
    """Return the arguments of the class or function with the dotted name `target`.

    Raises:
        LookupError, ImportError: there is no such module or name.
    """
    module, _, name = target.rpartition(".")
    if module.split(".")[0] != PACKAGE.name:
        return _imported(module, name)
    names = _names(module)
    match names.get(name):
        case str() as elsewhere:
            return constructor_arguments(elsewhere)
        case ast.FunctionDef(args=arguments):
            return _signature(arguments, names)
        case ast.ClassDef() as node:
            return _class_arguments(node, module, names)
    known = [name for name, node in names.items() if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    raise LookupError(f"{module} defines no {name}{nearest(name, known)}")


def class_constant(target: str, name: str) -> Any:
    """Return the literal that a class with the dotted name `target`, or a base of it, assigns to `name`, or None.

    A mapping, such as `relations`, includes those of the bases, unless the class has a constructor of its own.
    """
    module, _, class_name = target.rpartition(".")
    if module.split(".")[0] != PACKAGE.name:
        return getattr(getattr(importlib.import_module(module), class_name, None), name, None)
    names = _names(module)
    node = names.get(class_name)
    if isinstance(node, str):
        return class_constant(node, name)
    if not isinstance(node, ast.ClassDef):
        return None
    inherited = [class_constant(base, name) for base in _bases(node, module, names)]
    constants = [constant for constant in inherited if constant is not None]
    constant = constants[0] if constants else None
    if isinstance(constant, dict):
        constant = {key: value for mapping in reversed(constants) for key, value in mapping.items()}
    for item in node.body:
        match item:
            case ast.Assign(targets=[ast.Name(id=assigned)], value=value) if assigned == name:
                own = ast.literal_eval(value)
                extends = isinstance(own, dict) and not any(
                    getattr(other, "name", "") == "__init__" for other in node.body
                )
                return {**(constant or {}), **own} if extends else own
    return constant


def class_docstring(target: str) -> str:
    """Return the docstring of the class with the dotted name `target`; empty without one."""
    module, _, name = target.rpartition(".")
    if module.split(".")[0] != PACKAGE.name:
        return inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
    node = _names(module).get(name)
    if isinstance(node, str):
        return class_docstring(node)
    return (ast.get_docstring(node) or "") if isinstance(node, ast.ClassDef | ast.FunctionDef) else ""


def class_bases(target: str) -> list[str]:
    """Return the dotted names of the bases of a class of this package, those without arguments left out."""
    module, _, name = target.rpartition(".")
    if module.split(".")[0] != PACKAGE.name:
        return []
    names = _names(module)
    node = names.get(name)
    if isinstance(node, str):
        return class_bases(node)
    return _bases(node, module, names) if isinstance(node, ast.ClassDef) else []


def _bases(node: ast.ClassDef, module: str, names: dict[str, ast.stmt | str]) -> list[str]:
    """Return the dotted names of the bases of a class, those from outside the package without arguments left out."""
    targets = []
    for base in node.bases:
        first, _, rest = ast.unparse(base.value if isinstance(base, ast.Subscript) else base).partition(".")
        source = names.get(first)
        parts = (source, rest) if isinstance(source, str) else (module, first, rest)
        targets.append(".".join(filter(None, parts)))
    return [target for target in targets if target.rpartition(".")[2] not in _WITHOUT_ARGUMENTS]


def _class_arguments(node: ast.ClassDef, module: str, names: dict[str, ast.stmt | str]) -> dict[str, Argument]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return dict(list(_signature(item.args, names).items())[1:])
    arguments: dict[str, Argument] = {}
    for base in reversed(_bases(node, module, names)):
        arguments |= constructor_arguments(base)
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        arguments |= {
            ast.unparse(field.target): Argument(
                _expanded(field.annotation, names), field.value is not None, field.value
            )
            for field in fields
        }
    return arguments


@cache
def _names(module: str) -> dict[str, ast.stmt | str]:
    """Return a module's top-level names: the statement that defines each, or the dotted name that it imports."""
    stem = PACKAGE.joinpath(*module.split(".")[1:])
    path = next((file for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.exists()), None)
    if path is None:
        raise LookupError(f"there is no module {module}")
    names: dict[str, ast.stmt | str] = {}
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                names[name] = node
            case ast.Import(names=aliases):
                names |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in aliases}
            case ast.ImportFrom(module=str() as source, names=aliases):
                names |= {alias.asname or alias.name: f"{source}.{alias.name}" for alias in aliases}
    return names


def _signature(arguments: ast.arguments, names: dict[str, ast.stmt | str]) -> dict[str, Argument]:
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    defaults = [*[None] * required, *arguments.defaults, *arguments.kw_defaults]
    signature = {
        argument.arg: Argument(_expanded(argument.annotation, names), default is not None, default)
        for argument, default in zip([*positional, *arguments.kwonlyargs], defaults, strict=True)
    }
    if arguments.kwarg:
        signature[ANY_KEY] = Argument(_expanded(arguments.kwarg.annotation, names), True)
    return signature


def _expanded(annotation: ast.expr | None, names: dict[str, ast.stmt | str]) -> ast.expr | None:
    """Return the annotation with the aliases of its module (`Side = Literal["a", "b"]`) replaced by their values."""
    return None if annotation is None else _Aliases(names).visit(copy.deepcopy(annotation))


class _Aliases(ast.NodeTransformer):
    def __init__(self, names: dict[str, ast.stmt | str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:  # noqa: N802 (ast's name)
        alias = self._names.get(node.id)
        return self.visit(copy.deepcopy(alias.value)) if isinstance(alias, ast.Assign) else node


def _imported(module: str, name: str) -> dict[str, Argument]:
    target = getattr(importlib.import_module(module), name, None)
    if target is None:
        raise LookupError(f"{module} defines no {name}")
    try:
        signature = inspect.signature(target, eval_str=True)
    except NameError:
        # An annotation that only a type checker imports.
        signature = inspect.signature(target)
    parameters = [
        parameter.replace(default=parameter.empty if parameter.default is parameter.empty else None)
        for parameter in signature.parameters.values()
    ]
    text = signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    (definition,) = ast.parse(f"def constructor{text}: ...").body
    assert isinstance(definition, ast.FunctionDef)
    return _signature(definition.args, {})
