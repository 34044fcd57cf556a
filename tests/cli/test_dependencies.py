"""Declared dependencies are those that the code imports."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
import sys
import tomllib

import pytest

from clipzoo.errors import installation
from tests.support.paths import ROOT

MODULES = {
    "hydra-core": "hydra", "pillow": "PIL", "faiss-cpu": "faiss", "pyyaml": "yaml", "open_clip_torch": "open_clip",
    "scikit-learn": "sklearn", "hydra-submitit-launcher": "hydra_plugins",
    "mlflow-skinny": "mlflow", "mkdocs-material": "material", "umap-learn": "umap",
}  # fmt: skip
"""Distributions whose module has another name."""
PROVIDED = {"open_clip_train": "open_clip", "griffe": "mkdocstrings"}
"""Further modules of a declared distribution."""
LOADED_BY_NAME = {
    "tensorboard", "s3fs", "hydra_plugins", "onnx", "onnxscript", "material", "mkdocstrings", "ipykernel",
    "torchao", "duckdb", "py3langid", "ray", "bitsandbytes",
}  # fmt: skip
"""Used through another package: torch.utils.tensorboard, torch.onnx, Hydra's launchers, plugins of MkDocs, the
kernel of notebooks, file systems of fsspec, or imported by name where it is used."""


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def declared() -> set[str]:
    """Modules of the dependencies in pyproject.toml, with those of the users' extras."""
    extras = {name: lines for name, lines in PROJECT["optional-dependencies"].items() if name != "dev"}
    requirements = [*PROJECT["dependencies"], *itertools.chain(*extras.values())]
    names = {re.match(r"[\w-]+", requirement)[0].lower() for requirement in requirements}
    return {MODULES.get(name, name.replace("-", "_")) for name in names}


def imported() -> set[str]:
    """Third-party modules that clipzoo, train.py and scripts import."""
    files = [ROOT / "train.py", *(ROOT / "clipzoo").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    modules = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.add(node.module.split(".")[0])
    own = {"clipzoo", "scripts", *(path.stem for path in (ROOT / "scripts").iterdir())}
    return {PROVIDED.get(module, module) for module in modules - own - sys.stdlib_module_names}


@pytest.mark.medium
def test_every_third_party_import_is_a_declared_dependency():
    assert imported() - declared() == set()


def test_every_declared_dependency_is_imported():
    assert declared() - imported() - LOADED_BY_NAME == set()


def test_a_missing_extra_is_installed_from_the_checkout_or_by_the_names_of_its_packages(tmp_path):
    assert shlex.split(installation("hf")) == ["pip", "install", "-e", f"{ROOT}[hf]"]
    for extra, requirements in PROJECT["optional-dependencies"].items():
        packages = shlex.split(installation(extra, checkout=tmp_path))[2:]
        given, expected = (
            sorted(re.split(r"[<>=~]", line)[0].lower().replace("_", "-") for line in lines)
            for lines in (packages, requirements)
        )
        assert given == expected, extra


def test_no_page_or_message_installs_clipzoo_by_name_from_an_index():
    places = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docs", "conf", "clipzoo", "scripts", "slurm")]
    files = [file for place in places for file in ([place] if place.is_file() else place.rglob("*")) if file.is_file()]
    texts = [file for file in files if file.suffix in (".py", ".md", ".yaml", ".j2", ".sh", ".sbatch")]
    assert [file for file in texts if re.search(r"pip install '?clipzoo\b(?!\[EXTRA\])", file.read_text())] == []
