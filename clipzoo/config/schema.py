"""Check a configuration against the constructors that it names: their annotations and relations are its schema."""

from __future__ import annotations

import ast
import builtins
import copy
import importlib
import inspect
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache, wraps
from pathlib import Path, PurePath
from typing import Any, TypeVar, get_type_hints

from clipzoo.config import vocabulary
from clipzoo.config.groups import RENAMED_KEYS, is_group
from clipzoo.config.vocabulary import NonFinite
from clipzoo.errors import ConfigError, nearest

# Constructor annotations as checks of plain YAML values.


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


# Constructor arguments and constants of the classes that a configuration names.
#
# Modules of this package are parsed, not imported: torch takes seconds. Other packages' classes are imported.


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


# Values of a configuration that are found in the model, such as `image_size: from_model:image_size`.
#
# They remain as they are while the configuration is composed and checked, and while its run is looked up, because no
# model is built until then: `clipzoo.build.with_facts` fills them in. The run's config.yaml holds the values.


PREFIX = "from_model:"


def is_open(value: object) -> bool:
    """Return True for a value that is found in the model."""
    return isinstance(value, str) and value.startswith(PREFIX)


def has_open(plain: Any) -> bool:
    """Return True if any value in a configuration is found in the model."""
    if isinstance(plain, Mapping):
        return any(map(has_open, plain.values()))
    return any(map(has_open, plain)) if isinstance(plain, list) else is_open(plain)


def emptied(plain: Any) -> Any:
    """Return the configuration with null in place of the values that are found in the model."""
    return _replaced(plain, lambda value: None)


def filled(plain: Any, facts: Mapping[str, Any]) -> Any:
    """Return the configuration with the values that are found in the model.

    Raises:
        ConfigError: the model has no value of a name.
    """

    def value_of(value: str) -> Any:
        name = value.removeprefix(PREFIX)
        if name not in facts:
            raise ConfigError(f"{value}: this encoder gives no value {name}{nearest(name, list(facts))}")
        return facts[name]

    return _replaced(plain, value_of)


def _replaced(plain: Any, value_of: Any) -> Any:
    if isinstance(plain, Mapping):
        return {key: _replaced(value, value_of) for key, value in plain.items()}
    if isinstance(plain, list):
        return [_replaced(value, value_of) for value in plain]
    return value_of(plain) if is_open(plain) else plain


# Relations between values of a configuration, such as "image_size % patch_size == 0".
#
# A class states those of its constructor's arguments as `relations`, expression -> the sentence of the message, and
# sizes that follow from the arguments as `derived`, name -> expression. Both are read from the source, without
# importing the class. Dots lead into inner nodes: "image_width == image_tower.width".


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
            seen = {name: evaluate(name, values) for name in _relation_names(expression)}
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


def _relation_names(expression: str) -> list[str]:
    """Return the dotted names in an expression."""
    tree = ast.parse(expression, mode="eval")
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)]
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    outer = sorted((node for node in nodes if id(node) not in inner), key=lambda node: node.col_offset)
    names = [ast.unparse(node) for node in outer]
    return [name for name in dict.fromkeys(names) if name not in FUNCTIONS]


HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}
DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
LONGEST_VALUE = 100
"""Characters of a value in a message."""


def faults(config: Mapping[str, Any], path: str = "") -> list[str]:
    """Return a sentence for every fault of a resolved configuration: unknown keys, wrong values, missing values.

    Relations between values are checked once every value by itself is right.
    """
    nodes = list(_nodes(config, path))
    return [fault for node, place in nodes for fault in _node_faults(node, place)] or [
        fault
        for node, place in nodes
        for fault in broken(class_constant(node["_target_"], "relations") or {}, node, f"{place}.")
    ]


def value_faults(value: Any, annotation: ast.expr, path: str, name: str) -> Iterator[str]:
    """Yield a sentence if a value does not fit the annotation of the argument `path` of the class `name`."""
    try:
        kind = kind_of(annotation)
    except UncheckableError as error:
        argument, words = path.rsplit(".", 1)[-1], ast.unparse(annotation)
        part = "" if str(error) == words else f" ({error} in it)"
        yield f"{path}: the annotation {words} of {name}'s argument {argument} cannot be checked{part}: change it"
        return
    if not kind.admits(value) and not is_open(value):
        seen = "null" if value is None else f"{shown(value)} ({type(value).__name__})"
        group = path.replace(".", "/")
        remedy = f": choose it with {group}={value}" if isinstance(value, str) and is_group(group) else ""
        yield f"{path} must be {kind.words}, not {seen}{remedy}"


def shown(value: Any) -> str:
    """Return a value as a message shows it: on one line, long ones cut."""
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _nodes(config: Any, path: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield all nodes with a `_target_`, outer ones first, with their paths."""
    if isinstance(config, Mapping):
        if "_target_" in config:
            yield config, path
        for key, value in config.items():
            yield from _nodes(value, f"{path}.{key}" if path else str(key))
    elif isinstance(config, list):
        for index, item in enumerate(config):
            yield from _nodes(item, f"{path}[{index}]")


def _node_faults(config: Mapping[str, Any], path: str) -> Iterator[str]:
    target = config["_target_"]
    if not isinstance(target, str) or not DOTTED_NAME.fullmatch(target):
        yield f"{path}._target_ must be the dotted name of a class, not {shown(target)}"
        return
    name = target.rsplit(".", 1)[-1]
    try:
        arguments = constructor_arguments(target)
    except (LookupError, ImportError, SyntaxError, TypeError, ValueError) as error:
        yield f"{path}._target_={target}: {error}"
        return
    given = {key: value for key, value in config.items() if key not in HYDRA_KEYS}
    for key, value in given.items():
        argument = arguments.get(key) or arguments.get(ANY_KEY)
        if argument is None:
            new = RENAMED_KEYS.get(f"{path}.{key}")
            near = f"; did you mean {new}?" if new else nearest(key, list(arguments))
            hint = near or f": leave it out (~{path}.{key})"
            yield f"{path}.{key}: {name} has no such argument{hint}"
        elif argument.annotation is not None:
            yield from value_faults(value, argument.annotation, f"{path}.{key}", name)
    for key, argument in arguments.items():
        if key not in given and not argument.optional and "_partial_" not in config:
            yield f"{path}.{key} is missing: {name} needs it"


# Check the arguments of a constructor that Python calls, as those in a configuration are checked.


T = TypeVar("T")


def checked(cls: type[T]) -> type[T]:
    """Class decorator: the constructor raises ConfigError for arguments that its annotations or `relations` refuse.

    An argument annotated with a class or a Protocol must satisfy it.
    """
    build: Any = cls.__init__
    signature = inspect.signature(build)

    @wraps(build)
    def init(self: T, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:
            # The constructor's own error names the argument.
            return build(self, *args, **kwargs)
        bound.apply_defaults()
        values = dict(list(bound.arguments.items())[1:])
        faults = _faults(cls, values) or list(broken(_relations(cls), values))
        if faults:
            raise ConfigError(f"{cls.__name__}: " + "; ".join(faults))
        build(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[method-assign, assignment]
    return cls


def _relations(cls: type) -> dict[str, str]:
    """Return the relations of a class; of a dataclass, whose arguments include those of its bases, theirs too."""
    classes = reversed(cls.__mro__) if is_dataclass(cls) else (cls,)
    own = (base.__dict__.get("relations", {}) for base in classes)
    return {expression: sentence for relations in own for expression, sentence in relations.items()}


def _faults(cls: type, values: dict[str, Any]) -> list[str]:
    annotations = constructor_arguments(f"{cls.__module__}.{cls.__qualname__}")
    faults: list[str] = []
    for name, value in values.items():
        annotation = annotations[name].annotation
        if annotation is not None:
            faults += value_faults(value, annotation, name, cls.__name__)
    return faults or _kind_faults(cls, values)


def _kind_faults(cls: type, values: dict[str, Any]) -> list[str]:
    wanted = get_type_hints(inspect.unwrap(cls.__init__))  # type: ignore[misc]
    return [
        f"{name} must be {kind.__name__}, not {type(values[name]).__name__}"
        for name, kind in wanted.items()
        if name in values and isinstance(kind, type) and kind.__module__ != "builtins" and not is_a(values[name], kind)
    ]


def is_a(value: object, kind: type) -> bool:
    """Return True if a value is an instance of a class, or has all attributes of a Protocol. No property is read."""
    if not getattr(kind, "_is_protocol", False):
        return isinstance(value, kind)
    names = {**vars(kind), **kind.__dict__.get("__annotations__", {})}
    wanted = [name for name in names if name == "__call__" or not name.startswith("_")]
    return all(inspect.getattr_static(value, name, None) is not None for name in wanted)
