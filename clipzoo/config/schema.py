"""Check a configuration against the constructors that it names: their annotations and relations are its schema."""

from __future__ import annotations

import ast
import builtins
import collections.abc
import importlib
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache, wraps
from pathlib import Path, PurePath
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from clipzoo.config import vocabulary
from clipzoo.config.groups import is_group
from clipzoo.config.vocabulary import Ascending, Distinct, MultipleOf, NonFinite, Range
from clipzoo.errors import ConfigError, nearest
from clipzoo.io import Kind, shortened

FLOAT32_MAX = 3.4028234663852886e38
INT64_MAX = 2**63 - 1
PLAIN = (bool, int, float, str, list, tuple, Mapping, type(None))
"""Types of the values that YAML can write."""
PACKAGE = Path(__file__).resolve().parents[1]
ANY_KEY = "**"
"""Name of a constructor's **kwargs among its arguments."""
_WITHOUT_ARGUMENTS = {"object", "ABC", "Protocol", "Generic", "Module", "Part"}
"""Bases whose constructors take no arguments."""
_LIMITS = {"above": "exclusiveMinimum", "at_least": "minimum", "below": "exclusiveMaximum", "at_most": "maximum",
           "divisor": "multipleOf"}  # fmt: skip
"""Bound of the vocabulary -> its keyword in JSON Schema."""
PREFIX = "from_model:"
"""Prefix of a value that is taken from the model; see `filled`."""
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
"""Relations between the groups of a run; see `broken`."""
HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}
T = TypeVar("T")


def faults(config: Mapping[str, Any], path: str = "") -> list[str]:
    """Return a sentence for every unknown key and wrong or missing value, or else for every broken relation."""
    located_nodes = list(nodes(config, path))
    return [fault for node, place in located_nodes for fault in _node_faults(node, place)] or [
        fault
        for node, place in located_nodes
        for fault in broken(class_constant(node["_target_"], "relations") or {}, node, f"{place}.")
    ]


def checked(cls: type[T]) -> type[T]:
    """Class decorator: the constructor raises ConfigError for arguments that its annotations or `relations` refuse."""
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
        arguments = constructor_arguments(f"{cls.__module__}.{cls.__qualname__}")
        faults = [
            fault for name in values for fault in _value_faults(values[name], arguments[name], name, cls.__name__)
        ]
        if not faults:
            hints = get_type_hints(inspect.unwrap(cls.__init__))  # type: ignore[misc]
            faults = [
                f"{name} must be {kind.__name__}, not {type(values[name]).__name__}"
                for name, kind in hints.items()
                if name in values and isinstance(kind, type) and kind.__module__ != "builtins"
                and not is_a(values[name], kind)
            ]  # fmt: skip
        # The arguments of a dataclass include those of its bases, and so do its relations.
        classes = reversed(cls.__mro__) if is_dataclass(cls) else (cls,)
        relations = [relation for base in classes for relation in base.__dict__.get("relations", {}).items()]
        if faults := faults or list(broken(dict(relations), values)):
            raise ConfigError(f"{cls.__name__}: " + "; ".join(faults))
        build(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[method-assign, assignment]
    return cls


def is_a(value: object, kind: type) -> bool:
    """Return True if a value is an instance of a class, or has all attributes of a Protocol. No property is read."""
    if not getattr(kind, "_is_protocol", False):
        return isinstance(value, kind)
    names = {**vars(kind), **kind.__dict__.get("__annotations__", {})}
    attributes = [name for name in names if name == "__call__" or not name.startswith("_")]
    return all(inspect.getattr_static(value, name, None) is not None for name in attributes)


def nodes(config: Any, path: str = "") -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield all nodes with a `_target_`, outer ones first, with their paths."""
    if isinstance(config, Mapping):
        if "_target_" in config:
            yield config, path
        for key, value in config.items():
            yield from nodes(value, f"{path}.{key}" if path else str(key))
    elif isinstance(config, list):
        for index, item in enumerate(config):
            yield from nodes(item, f"{path}[{index}]")


def _node_faults(config: Mapping[str, Any], path: str) -> Iterator[str]:
    target = config["_target_"]
    if not isinstance(target, str) or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", target):
        yield f"{path}._target_ must be the dotted name of a class, not {shortened(target, 100)}"
        return
    name = target.rsplit(".", 1)[-1]
    try:
        arguments = constructor_arguments(target)
    except (LookupError, ImportError, SyntaxError, TypeError, ValueError) as error:
        yield f"{path}._target_={target}: {error}"
        return
    values = {key: value for key, value in config.items() if key not in HYDRA_KEYS}
    for key, value in values.items():
        if argument := arguments.get(key) or arguments.get(ANY_KEY):
            yield from _value_faults(value, argument, f"{path}.{key}", name)
            continue
        remedy = nearest(key, list(arguments)) or f": leave it out (~{path}.{key})"
        yield f"{path}.{key}: {name} has no such argument{remedy}"
    for key, argument in arguments.items():
        if key not in values and not argument.optional and "_partial_" not in config:
            yield f"{path}.{key} is missing: {name} needs it"


def _value_faults(value: Any, argument: Argument, path: str, name: str) -> Iterator[str]:
    """Yield a sentence if a value does not fit the argument `path` of the class `name`."""
    if argument.annotation is None:
        return
    try:
        kind = kind_of(argument.annotation)
    except UncheckableError as error:
        words, key = name_of(argument.annotation), path.rsplit(".", 1)[-1]
        part = "" if str(error) == words else f" ({error} in it)"
        yield f"{path}: the annotation {words} of {name}'s argument {key} cannot be checked{part}: change it"
        return
    if not kind.admits(value) and not is_open(value):
        actual = "null" if value is None else f"{shortened(value, 100)} ({type(value).__name__})"
        group = path.replace(".", "/")
        remedy = f": choose it with {group}={value}" if isinstance(value, str) and is_group(group) else ""
        yield f"{path} must be {kind.words}, not {actual}{remedy}"


class UncheckableError(LookupError):
    """YAML values cannot be checked against this annotation."""


def kinds_of(annotations: Mapping[str, Any]) -> dict[str, Kind]:
    """Return the kinds of annotations by key, for `io.require_fields`."""
    return {key: kind_of(annotation) for key, annotation in annotations.items()}


def kind_of(annotation: Any) -> Kind:
    """Return the kind of values that an annotation, such as `Count`, or its source text admits.

    A class that YAML cannot write, such as `Kernel`, admits a mapping with `_target_`, and objects in Python.

    Raises UncheckableError if the annotation has none of the forms below.
    """
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        annotation = _evaluated(annotation, {})
    parameters = get_args(annotation)
    origin = get_origin(annotation) or annotation
    if origin in _SIMPLE and not parameters:
        return _SIMPLE[origin]
    if origin is Annotated:
        # Metadata outside the vocabulary is ignored.
        base, *constraints = parameters
        kind = kind_of(base)
        bounds = [one for one in constraints if isinstance(one, Range | MultipleOf | Ascending | Distinct)]
        text = " ".join(["a number" if base is float else kind.words, *(bound.words for bound in bounds)])
        admits = _is_number if any(isinstance(one, NonFinite) for one in constraints) else kind.admits
        limits = {_LIMITS[name]: limit for one in bounds for name, limit in vars(one).items() if limit is not None}
        schema = {**kind.schema, **limits, **({"uniqueItems": True} if Distinct() in bounds else {})}
        return Kind(text, lambda value: admits(value) and all(bound.admits(value) for bound in bounds), schema)
    if origin is typing.Literal:
        constants = [(type(constant), constant) for constant in parameters]
        schema = {"enum": [*parameters]}
        return Kind(" or ".join(map(str, parameters)), lambda value: (type(value), value) in constants, schema)
    is_class = isinstance(origin, type) and origin.__module__ not in ("builtins", "typing", "collections.abc", "types")
    if is_class or origin is collections.abc.Callable:
        return Kind(
            name_of(annotation),
            lambda value: isinstance(value, Mapping) and "_target_" in value or not isinstance(value, PLAIN),
            {"type": "object"},
        )
    if origin not in _COMPOUND:
        raise UncheckableError(name_of(annotation))

    kinds = [kind_of(parameter) for parameter in parameters if parameter is not ...]
    words = list(dict.fromkeys(kind.words for kind in kinds))
    if origin in (typing.Union, types.UnionType):
        schema = {"anyOf": [kind.schema for kind in kinds]}
        return Kind(" or ".join(words), lambda value: any(kind.admits(value) for kind in kinds), schema)
    if origin in (list, collections.abc.Sequence) or ... in parameters:
        (kind,) = kinds
        schema = {"type": "array", "items": kind.schema}
        text = f"a list, every value {kind.words}"
        return Kind(text, lambda value: _is_list(value) and all(map(kind.admits, value)), schema)
    if origin is tuple:
        values = f"every value {words[0]}" if len(words) == 1 else ", ".join(kind.words for kind in kinds)

        def fits(value: Any) -> bool:
            is_pair = _is_list(value) and len(value) == len(kinds)
            return is_pair and all(kind.admits(part) for kind, part in zip(kinds, value, strict=True))

        sizes = dict.fromkeys(("minItems", "maxItems"), len(kinds))
        schema = {"type": "array", "items": [kind.schema for kind in kinds], **sizes}
        return Kind(f"a list of {len(kinds)}, {values}", fits, schema)
    keys, inner = kinds
    return Kind(
        name_of(annotation),
        lambda value: (
            isinstance(value, Mapping) and all(map(keys.admits, value)) and all(map(inner.admits, value.values()))
        ),
        {"type": "object", "additionalProperties": inner.schema},
    )


def name_of(annotation: Any) -> str:
    """Return an annotation as Python writes it, with the last part of dotted names."""
    if isinstance(annotation, str | list):
        return annotation if isinstance(annotation, str) else f"[{', '.join(map(name_of, annotation))}]"
    parameters = list(map(name_of, get_args(annotation)))
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return " | ".join(parameters)
    special: dict[Any, str] = {type(None): "None", ...: "..."}
    name = special[annotation] if annotation in special else str(getattr(annotation, "__name__", annotation))
    return f"{name}[{', '.join(parameters)}]" if parameters else name


def _evaluated(text: str, names: Mapping[str, ast.stmt | str]) -> Any:
    """Evaluate the source text of an annotation; return the text itself if it cannot be evaluated.

    names: names of the module, see `_names`; its aliases (`Side = Literal["a", "b"]`) are replaced by their values.
    """
    try:
        annotation = eval(text, {}, _Meanings(names))
        # A quoted annotation, "Count | None".
        return _evaluated(annotation, names) if isinstance(annotation, str) else annotation
    except (TypeError, SyntaxError):
        return text


_KNOWN_NAMES = {name: getattr(typing, name) for name in typing.__all__} | vars(vocabulary)
_KNOWN_NAMES |= {"typing": typing, "Path": Path}


class _Meanings(dict[str, Any]):
    """Values of names in annotations: the vocabulary, typing's names, aliases of a module, classes by their name."""

    def __init__(self, names: Mapping[str, ast.stmt | str]) -> None:
        aliases = {name for name, node in names.items() if isinstance(node, ast.Assign)}
        super().__init__({name: _KNOWN_NAMES[name] for name in _KNOWN_NAMES.keys() - aliases})
        self._names = names

    def __missing__(self, name: str) -> Any:
        alias = self._names.get(name)
        if isinstance(alias, ast.Assign):
            return eval(ast.unparse(alias.value), {}, self)
        if hasattr(builtins, name):
            raise KeyError(name)
        return _Named(name, (), {})


class _Named(type):
    """A class known only by its name; its attributes are such classes too, as in `nn.Module`."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Named(f"{cls.__name__}.{name}", (), {})


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -INT64_MAX <= value <= INT64_MAX


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_whole(value)


_NULL = Kind("null", lambda value: value is None, {"type": "null"})
_TEXT = Kind("str", lambda value: isinstance(value, str | PurePath), {"type": "string"})
_NUMBER, _LIST, _OBJECT = ({"type": name} for name in ("number", "array", "object"))
_SIMPLE: dict[Any, Kind] = {
    Any: Kind("any value", lambda value: True),
    type(None): _NULL, None: _NULL,
    bool: Kind("bool", lambda value: isinstance(value, bool), {"type": "boolean"}),
    int: Kind("a whole number", _is_whole, {"type": "integer"}),
    float: Kind("a finite number", lambda value: _is_number(value) and -FLOAT32_MAX <= value <= FLOAT32_MAX, _NUMBER),
    str: _TEXT, Path: Kind("Path", _TEXT.admits, _TEXT.schema),
    list: Kind("list", _is_list, _LIST), tuple: Kind("tuple", _is_list, _LIST),
    dict: Kind("dict", lambda value: isinstance(value, Mapping), _OBJECT),
    collections.abc.Sequence: Kind("Sequence", _is_list, _LIST),
    collections.abc.Mapping: Kind("Mapping", lambda value: isinstance(value, Mapping), _OBJECT),
}  # fmt: skip
_COMPOUND = (typing.Union, types.UnionType, list, collections.abc.Sequence, tuple, dict, collections.abc.Mapping)


# Constructor arguments and constants of the classes that a configuration names.
#
# Modules of this package are parsed, not imported: torch takes seconds. Other packages' classes are imported.


class Argument(NamedTuple):
    """A constructor argument. annotation: None without one. default: source text, empty for other packages' classes."""

    annotation: Any
    optional: bool
    default: str = ""


def constructor_arguments(target: str) -> dict[str, Argument]:
    """Return the arguments of a class or function by its dotted name. Raises LookupError or ImportError without one."""
    module, node = _definition(target)
    if isinstance(node, ast.FunctionDef):
        return _signature(node.args, module)
    arguments: dict[str, Argument] = {}
    if not isinstance(node, ast.ClassDef):
        try:
            signature = inspect.signature(node, eval_str=True)
        except NameError:
            # An annotation names a class that is imported only for type checkers.
            signature = inspect.signature(node)
        for parameter in signature.parameters.values():
            is_keywords = parameter.kind is parameter.VAR_KEYWORD
            annotation = None if parameter.annotation is parameter.empty else parameter.annotation
            if parameter.kind is not parameter.VAR_POSITIONAL:
                optional = is_keywords or parameter.default is not parameter.empty
                arguments[ANY_KEY if is_keywords else parameter.name] = Argument(annotation, optional)
        return arguments
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return dict(list(_signature(item.args, module).items())[1:])
    for base in reversed(_bases(node, module)):
        arguments |= constructor_arguments(base)
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        for field in node.body:
            if isinstance(field, ast.AnnAssign):
                arguments[ast.unparse(field.target)] = _argument(field.annotation, field.value, module)
    return arguments


def class_constant(target: str, name: str) -> Any:
    """Return the literal that a class with the dotted name `target`, or a base of it, assigns to `name`, or None.

    A mapping, such as `relations`, includes those of the bases, unless the class has its own constructor.
    """
    module, node = _definition(target)
    if not isinstance(node, ast.stmt):
        return getattr(node, name, None)
    if not isinstance(node, ast.ClassDef):
        return None
    inherited = [class_constant(base, name) for base in _bases(node, module)]
    constants = [constant for constant in inherited if constant is not None]
    constant = constants[0] if constants else None
    if isinstance(constant, dict):
        constant = {key: value for mapping in reversed(constants) for key, value in mapping.items()}
    for item in node.body:
        match item:
            case ast.Assign(targets=[ast.Name(id=assigned)], value=value) if assigned == name:
                literal = ast.literal_eval(value)
                has_init = any(getattr(other, "name", "") == "__init__" for other in node.body)
                return {**(constant or {}), **literal} if isinstance(literal, dict) and not has_init else literal
    return constant


def docstrings(target: str) -> Iterator[str]:
    """Yield the docstring of the class with the dotted name `target`, then those of its bases in this package."""
    module, node = _definition(target)
    if not isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield inspect.getdoc(node) or ""
        return
    yield ast.get_docstring(node) or ""
    for base in _bases(node, module) if isinstance(node, ast.ClassDef) else ():
        yield from docstrings(base)


def _definition(target: str) -> tuple[str, Any]:
    """Return the module of a class or function and the statement that defines it, or the object of another package."""
    module, _, name = target.rpartition(".")
    if module.split(".")[0] != PACKAGE.name:
        if (definition := getattr(importlib.import_module(module), name, None)) is None:
            raise LookupError(f"{module} defines no {name}")
        return module, definition
    names = _names(module)
    node = names.get(name)
    if isinstance(node, str):
        return _definition(node)
    if not isinstance(node, ast.ClassDef | ast.FunctionDef):
        defined = [name for name, node in names.items() if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        raise LookupError(f"{module} defines no {name}{nearest(name, defined)}")
    return module, node


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


def _bases(node: ast.ClassDef, module: str) -> list[str]:
    """Return the dotted names of the bases of a class, without bases whose constructors take no arguments."""
    targets = []
    for base in node.bases:
        first, _, rest = ast.unparse(base.value if isinstance(base, ast.Subscript) else base).partition(".")
        source = _names(module).get(first)
        targets.append(".".join(filter(None, (source, rest) if isinstance(source, str) else (module, first, rest))))
    return [target for target in targets if target.rpartition(".")[2] not in _WITHOUT_ARGUMENTS]


def _signature(arguments: ast.arguments, module: str) -> dict[str, Argument]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults, *arguments.kw_defaults]
    signature = {
        argument.arg: _argument(argument.annotation, default, module)
        for argument, default in zip([*positional, *arguments.kwonlyargs], defaults, strict=True)
    }
    if arguments.kwarg:
        signature[ANY_KEY] = _argument(arguments.kwarg.annotation, None, module)._replace(optional=True)
    return signature


def _argument(annotation: ast.expr | None, default: ast.expr | None, module: str) -> Argument:
    meaning = None if annotation is None else _evaluated(ast.unparse(annotation), _names(module))
    return Argument(meaning, default is not None, "" if default is None else ast.unparse(default))


# Values of a configuration that are taken from the model, such as `image_size: from_model:image_size`.
#
# They stay unresolved while the configuration is composed and checked and its run is looked up, because no model is
# built until then: `filled` replaces them afterwards. The run's config.yaml holds the values.


def is_open(value: object) -> bool:
    """Return True for a value that is taken from the model."""
    return isinstance(value, str) and value.startswith(PREFIX)


def filled(plain: Any, facts: Mapping[str, Any] | None) -> Any:
    """Replace `from_model:NAME` by the model's facts, or by null without facts. Raises ConfigError for another NAME."""

    def value(text: str) -> Any:
        if not is_open(text) or facts is None:
            return None if is_open(text) else text
        name = text.removeprefix(PREFIX)
        if name not in facts:
            raise ConfigError(f"{text}: this encoder gives no value {name}{nearest(name, list(facts))}")
        return facts[name]

    return mapped(plain, value)


def mapped(plain: Any, change: Callable[[str], Any]) -> Any:
    """Return nested mappings and lists with `change(text)` in place of every text."""
    if isinstance(plain, Mapping):
        return {key: mapped(value, change) for key, value in plain.items()}
    if isinstance(plain, list):
        return [mapped(value, change) for value in plain]
    return change(plain) if isinstance(plain, str) else plain


# Relations between values of a configuration, such as "image_size % patch_size == 0".
#
# A class declares relations of its constructor's arguments as `relations`, expression -> sentence of the message, and
# sizes that follow from the arguments as `derived`, name -> expression. Both are read from the source, without
# importing the class. Dots lead into inner nodes: "image_width == image_tower.width".


def at_most(value: float, bound: float) -> bool:
    """Return True if value <= bound, or if rounding explains the difference: 1 / (1 / 14.3) exceeds 14.3."""
    return value <= bound or math.isclose(value, bound, rel_tol=1e-6)


FUNCTIONS: dict[str, Callable[..., Any]] = {"sum": sum, "len": len, "min": min, "max": max, "at_most": at_most}
"""Functions that an expression may call."""


def broken(relations: Mapping[str, str], values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield a sentence for every relation that does not hold.

    A relation is skipped if one of its values is missing, null or of a wrong type, which its annotation reports, or if
    a value is taken from the model: the relation is checked again once the value is known.
    """
    for expression, sentence in relations.items():
        # The dotted names in the expression, in their order.
        nodes = [node for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Name | ast.Attribute)]
        inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        outer = sorted((node for node in nodes if id(node) not in inner), key=lambda node: node.col_offset)
        names = dict.fromkeys(ast.unparse(node) for node in outer)
        try:
            actual = {name: evaluate(name, values) for name in names if name not in FUNCTIONS}
            if any(map(is_open, actual.values())) or (None in actual.values() and " None" not in expression):
                continue
            holds = evaluate(expression, values)
        except (LookupError, NameError, AttributeError, TypeError, ZeroDivisionError):
            continue
        if not holds:
            yield f"{', '.join(f'{path}{name}={value}' for name, value in actual.items())}: {sentence}"


def evaluate(expression: str, values: Mapping[str, Any]) -> Any:
    """Return the value of an expression over the values of a node."""
    return eval(expression, {"__builtins__": {}, **FUNCTIONS}, _Values(values))  # type: ignore[arg-type]


class _Values:
    """The values of a node by name, sizes that its class derives from them, and constants of the class."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Any:
        if name in self._values:
            value = self._values[name]
            return _Values(value) if isinstance(value, Mapping) else value
        target = self._values.get("_target_")
        if not isinstance(target, str):
            raise KeyError(name)
        derived = class_constant(target, "derived") or {}
        constant = evaluate(derived[name], self._values) if name in derived else class_constant(target, name)
        if constant is None:
            raise KeyError(name)
        return constant

    __getattr__ = __getitem__
