"""Modules imported without the `__init__` of their package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from clipzoo.io.weights import import_alone


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package `large` whose `__init__` imports its module `heavy`; its module `light` needs neither."""
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .heavy import answer\nfrom . import light\nplain = light.value + 1\n")
    (folder / "heavy.py").write_text("answer = 42\n")
    (folder / "light.py").write_text("value = 1\nclass Kind: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "large"
    for name in [name for name in sys.modules if name.partition(".")[0] == "large"]:
        del sys.modules[name]


def test_a_module_is_imported_without_what_its_package_imports(package: str) -> None:
    assert import_alone(f"{package}.light").value == 1
    assert f"{package}.heavy" not in sys.modules


def test_the_package_is_complete_once_a_name_of_it_is_read(package: str) -> None:
    light = import_alone(f"{package}.light")
    import large  # type: ignore[import-not-found]
    from large import answer

    assert (answer, large.plain) == (42, 2)
    assert large.light is light and large.light.Kind is light.Kind
    assert type(large) is ModuleType and large.__path__ and large.__name__ == "large"
    with pytest.raises(AttributeError, match="nothing"):
        large.nothing  # noqa: B018


def test_a_package_that_is_already_imported_stays_as_it_is(package: str) -> None:
    import large

    assert import_alone(f"{package}.light") is large.light
    assert type(large) is ModuleType


def test_a_missing_package_is_reported_as_by_an_import_statement() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package'"):
        import_alone("no_such_package.module")


def test_a_failing_package_fails_again_when_it_is_read_again(package: str) -> None:
    import_alone(f"{package}.light")
    Path(sys.modules[package].__path__[0], "heavy.py").write_text("raise OSError('the disk is gone')\n")
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            from large import answer  # noqa: F401


@pytest.mark.slow
def test_towers_with_open_clips_blocks_import_neither_timm_nor_transformers() -> None:
    program = """
import sys, torch
from clipzoo.build import build_model
from clipzoo.config.compose import compose
model = build_model(compose(["encoder=tiny", "data.shards=x"]))
model.encoder.tokenizer(["a red square"])
assert not {"timm", "transformers"} & set(sys.modules), "imported for nothing"
from open_clip.transformer import TextTransformer
assert isinstance(model.encoder.text_tower.trunk, TextTransformer)
import open_clip
assert open_clip.create_model("ViT-B-32", pretrained=None) and open_clip.SimpleTokenizer and open_clip.__version__
assert open_clip.model.TextTransformer is TextTransformer and open_clip.list_models()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
