"""Imports of single modules of a large package, without all that the package's `__init__` imports."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any


class DeferredPackage(ModuleType):
    """A package whose `__init__` runs when a name is read that the package does not have yet."""

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        assert spec is not None and spec.loader is not None
        # From here on an ordinary module: its `__init__` may read names of its own.
        self.__class__ = ModuleType  # type: ignore[assignment]
        try:
            spec.loader.exec_module(self)
        except BaseException:
            self.__class__ = DeferredPackage  # type: ignore[assignment]
            raise
        return getattr(self, name)


def import_alone(name: str) -> Any:
    """Import the module PACKAGE.MODULE without running the package's `__init__` first.

    `import PACKAGE` works as always, before and after: its `__init__` runs when a name of it is first read.
    """
    package = name.partition(".")[0]
    if package not in sys.modules:
        spec = find_spec(package)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        deferred = module_from_spec(spec)
        deferred.__class__ = DeferredPackage
        sys.modules[package] = deferred
    return import_module(name)
