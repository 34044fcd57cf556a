"""The package's own code, for tests that read it."""

from __future__ import annotations

import ast
from functools import cache

from tests.support.paths import ROOT

PACKAGE = ROOT / "clipzoo"
FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
"""Modules by their path in the package."""


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax trees of FILES. Parsing takes seconds: never call this while tests are collected."""
    return {file: ast.parse(path.read_text()) for file, path in FILES.items()}
