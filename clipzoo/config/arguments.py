"""Check the arguments of a constructor that Python calls, as those in a configuration are checked."""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass
from functools import wraps
from typing import Any, TypeVar, get_type_hints

from clipzoo.config import relations
from clipzoo.config.constructors import constructor_arguments
from clipzoo.config.schema import value_faults
from clipzoo.errors import ConfigError

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
        faults = _faults(cls, values) or list(relations.broken(_relations(cls), values))
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
