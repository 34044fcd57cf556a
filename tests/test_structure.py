"""The structure of the package: who imports whom, and where facts about methods are written.

A list of exceptions holds what breaks a rule today, with the reason; an exception that is no longer needed fails too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.support.paths import CONF
from tests.support.sources import FILES, PACKAGE, trees

ORDER = (
    "errors", "io", "config", "runs", "distributed", "types", "ops", "heads", "objectives", "distillation",
    "encoders", "model", "data", "evaluation", "training", "build", "loading", "exports", "initial", "teachers",
    "report", "explore", "cli", "plan", "lab",
)  # fmt: skip
"""Packages and modules from low to high: a module imports only from its own package and from lower ones."""
LEAVES = ("clipzoo.lab", "clipzoo.plan", "clipzoo.explore")
"""Nothing imports them; commands call them by name."""
MODULES = {".".join(("clipzoo", *Path(file).with_suffix("").parts)).removesuffix(".__init__"): file for file in FILES}


@cache
def imported(file: str, type_checking: bool = False) -> list[str]:
    """Return the modules of this package that a file imports anywhere, lazy imports included."""
    hidden: set[int] = set()
    found: list[str] = []
    for block in ast.walk(trees()[file]):
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test) and not type_checking:
            hidden |= {id(node) for node in ast.walk(block)}
    for node in ast.walk(trees()[file]):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module is not None and id(node) not in hidden:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in full]
        elif isinstance(node, ast.Import) and id(node) not in hidden:
            names = [alias.name for alias in node.names]
        found += [name for name in names if name in MODULES and MODULES[name] != file]
    return found


def part_of(module: str) -> str:
    """clipzoo.heads.vector -> heads; empty for clipzoo itself, which is above everything."""
    return (module.split(".") + [""])[1]


def module_of(file: str) -> str:
    return next(module for module, other in MODULES.items() if other == file)


@pytest.mark.parametrize("file", FILES)
def test_a_module_imports_only_from_its_own_package_and_lower_ones(file):
    own = part_of(module_of(file))
    if own:
        above = [name for name in imported(file, type_checking=True) if part_of(name) in ORDER[ORDER.index(own) + 1 :]]
        assert not above, f"{file} imports {above}, which is above {own}"


def test_all_packages_have_their_place_in_the_order():
    assert {part_of(module) for module in MODULES} - {""} <= set(ORDER)


def test_no_files_import_each_other_in_a_circle():
    graph = {file: {MODULES[name] for name in imported(file)} for file in FILES}
    # Remove the files that import no file that is left, until none can be removed: the rest holds all circles.
    while free := [file for file, targets in graph.items() if not targets & graph.keys()]:
        for file in free:
            del graph[file]
    while free := [file for file in graph if not any(file in targets for targets in graph.values())]:
        for file in free:
            del graph[file]
    assert not graph, {file: sorted(targets & graph.keys()) for file, targets in graph.items()}


FROM_THEIR_PACKAGE: dict[str, str] = {}
"""Files that import from the `__init__` of a package that holds them, and why they may."""


def test_no_file_imports_from_the_package_that_holds_it():
    found = {
        file for file in FILES for name in imported(file, type_checking=True)
        if MODULES[name].endswith("__init__.py") and FILES[file].is_relative_to(FILES[MODULES[name]].parent)
    }  # fmt: skip
    assert found == FROM_THEIR_PACKAGE.keys()


IMPORTERS_OF_LEAVES: dict[str, str] = {
    "cli/models.py": "the commands index, search and explore import the leaf when they run",
}
"""Files that import a leaf, and why they may."""


def test_nothing_imports_a_leaf():
    found = {
        file
        for file in FILES
        for name in imported(file)
        for leaf in LEAVES
        if name.startswith(leaf) and not module_of(file).startswith(LEAVES)
    }
    assert found == IMPORTERS_OF_LEAVES.keys()


LARGE_FOLDERS: dict[str, str] = {"objectives": "one file for each objective"}
"""Folders of more than 15 files, and why they may."""


def test_folders_are_small_enough_to_find_a_file_by_its_name():
    folders = {path.parent for path in FILES.values()}
    files = {folder: [path for path in folder.glob("*.py") if path.name != "__init__.py"] for folder in folders}
    large = {str(folder.relative_to(PACKAGE)) for folder, paths in files.items() if len(paths) > 15}
    assert large == LARGE_FOLDERS.keys(), {str(folder): len(paths) for folder, paths in files.items()}


def test_only_one_module_reads_the_rank_from_the_environment():
    read = re.compile(r'"(RANK|WORLD_SIZE|LOCAL_RANK)"(?!\] = )')  # an assignment is for child processes
    assert [file for file, path in FILES.items() if read.search(path.read_text())] == ["distributed/launch.py"]


# Contracts: what an encoder, a head, an objective or a dataset can do is an attribute of its base class or Protocol.

CONTRACTS = (
    "types.py", "model.py", "encoders/base.py", "heads/base.py", "objectives/base.py", "training/parts.py",
    "data/tokenizer.py", "data/dataset.py", "encoders/towers.py", "evaluation/datasets/dataset.py",
)  # fmt: skip
"""Files with our base classes and Protocols."""
FOREIGN_OBJECTS: dict[tuple[str, str], str] = {
    ("config/schema.py", "getattr(other, 'name', '')"): "a node of a syntax tree",
    ("encoders/open_clip.py", "getattr(tower, 'width', 0)"): "a tower of open_clip",
    ("evaluation/datasets/readers.py", "getattr(dataset, 'samples', None)"): "a dataset of torchvision",
    ("encoders/tuning.py", "getattr(module, 'groups', 1)"): "a module of torch",
    ("initial.py", "getattr(trunk, 'config', None)"): "a model of transformers",
}
"""getattr with a default for a name that a contract of ours declares too, by file and expression, with the reason."""


def declared() -> set[str]:
    """Return the public attributes and methods of the classes in CONTRACTS."""
    names = set()
    for file in CONTRACTS:
        for owner in (node for node in trees()[file].body if isinstance(node, ast.ClassDef)):
            for node in ast.walk(owner):
                match node:
                    case ast.AnnAssign(target=ast.Name(id=name)) | ast.FunctionDef(name=name):
                        names.add(name)
                    case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                        names.add(name)
    return {name for name in names if not name.startswith("_")}


def test_members_of_our_contracts_are_not_asked_for_with_a_default():
    names = declared()
    found = set()
    for file, tree in trees().items():
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=name), _]) if name in names:
                    found.add((file, ast.unparse(node)))
                # f"{view}_tower"
                case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.JoinedStr(values=parts), _]):
                    texts = (re.escape(part.value) if isinstance(part, ast.Constant) else r"\w+" for part in parts)
                    pattern = "".join(texts)
                    if any(re.fullmatch(pattern, name) for name in names):
                        found.add((file, ast.unparse(node)))
    assert found == FOREIGN_OBJECTS.keys()


# Facts about a method (its cost, its citation, what it can do) are attributes of its class.

METHOD_FREE = ("report", "exports", "plan", "evaluation", "training", "runs")
"""Packages that name no head and no objective."""
FORMAT = "CLIP's and SigLIP's formats hold this head and no other"
METHODS_BY_NAME: dict[tuple[str, str], str] = {
    ("exports/open_clip.py", "ClipHead"): FORMAT,
    ("exports/transformers_models.py", "ClipHead"): FORMAT,
    ("report/published.py", "NUCLR"): "the name of a paper",
}
"""Names of methods in METHOD_FREE, by file and name, with the reason."""


def methods() -> Mapping[str, str]:
    """Return the classes of all heads and objectives of conf/ by name: KmeHead -> clipzoo.heads.kme.KmeHead."""
    files = [path for group in ("head", "objective") for path in (CONF / group).glob("*.yaml")]
    targets = [yaml.safe_load(path.read_text())["_target_"] for path in files]
    return {target.rpartition(".")[2]: target for target in targets}


def test_no_fact_about_a_method_is_written_outside_its_class():
    classes = methods()
    found = set()
    for file, tree in trees().items():
        if part_of(module_of(file)) not in METHOD_FREE:
            continue
        for node in ast.walk(tree):
            match node:
                case ast.Constant(value=str(text)) if text in classes or text in classes.values():
                    found.add((file, text.rpartition(".")[2]))
                case ast.ImportFrom(module=str(module), names=aliases):
                    imports = {f"{module}.{alias.name}" for alias in aliases} & set(classes.values())
                    found |= {(file, name.rpartition(".")[2]) for name in imports}
    assert found == METHODS_BY_NAME.keys()
