"""The structure of the package: the direction of imports and the size of folders."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "clipzoo"
ORDER = (
    "errors", "io", "config", "runs", "distributed", "types", "ops", "heads", "objectives", "encoders", "model",
    "data", "evaluation", "training", "build", "loading", "exports", "initial", "api", "report", "cli", "plan", "lab",
)  # fmt: skip
"""Packages and modules from low to high: a module imports only from its own package and from lower ones."""
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "conf" not in path.relative_to(PACKAGE).parts)


def part_of(module: str) -> str:
    """clipzoo.heads.vector -> heads; clipzoo itself stands above everything."""
    return (module.split(".") + [""])[1]


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of this package that a file imports anywhere, lazy imports included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names = [node.module] if node.module != "clipzoo" else [f"clipzoo.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "clipzoo" and part_of(name) in ORDER)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_its_own_package_and_lower_ones(path: Path) -> None:
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if own == "__init__":
        return
    upward = [name for name in imported(ast.parse(path.read_text())) if ORDER.index(part_of(name)) > ORDER.index(own)]
    assert not upward, f"{path.name} imports {upward}, which stand above {own}"


def test_all_packages_have_their_place_in_the_order() -> None:
    names = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in FILES}
    assert names - {"__init__"} == set(ORDER)


def test_folders_are_small_enough_to_find_a_file_by_its_name() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 8
    many = {str(folder.relative_to(PACKAGE)): count for folder, count in modules_by_folder().items() if count > 16}
    # One file a method in objectives and studies; training has three files of checkpoints too many.
    assert set(many) <= {"objectives", "training", "runs"}, many


def modules_by_folder() -> dict[Path, int]:
    folders = {path.parent for path in FILES}
    return {folder: sum(path.name != "__init__.py" for path in folder.glob("*.py")) for folder in folders}


def test_only_one_module_reads_the_rank_from_the_environment():
    readers = [path for path in FILES if re.search(r'"(RANK|WORLD_SIZE|LOCAL_RANK)"', path.read_text())]
    assert [path.relative_to(PACKAGE).as_posix() for path in readers] == ["distributed/launch.py"]
