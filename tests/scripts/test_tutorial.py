"""The tutorials: stored pages belong to their sources, and the notebooks of a free GPU run."""

from __future__ import annotations

import jupytext
import pytest
from PIL import Image

from scripts.documentation.tutorial import code, execute
from tests.support.paths import ROOT

TUTORIALS = ROOT / "docs" / "tutorials"
SHORTER = {
    "--train 4000": "--train 256 --processes 1",
    "--test 250 --scenes 250": "--test 20 --scenes 20",
    "trainer.epochs=8": "trainer.epochs=1 data.workers=0 eval.workers=0",
    "trainer.log_every=25": "trainer.log_every=1",
}
"""Changes of the first tutorial that make it quick."""


@pytest.mark.medium
@pytest.mark.parametrize("page", [path.with_suffix(".md") for path in sorted(TUTORIALS.glob("*.ipynb"))], ids=str)
def test_a_stored_tutorial_has_the_texts_and_commands_of_its_source(page):
    text = page.read_text()
    for cell in jupytext.read(page.with_suffix(".py")).cells:
        assert (cell.source if cell.cell_type == "markdown" else code(cell.source)) in text


@pytest.mark.medium
def test_the_first_tutorial_runs(tmp_path):
    text = (TUTORIALS / "first_model.py").read_text()
    for long, short in SHORTER.items():
        assert long in text
        text = text.replace(long, short)
    source = tmp_path / "first_model.py"
    source.write_text(text)
    notebook = execute(source, tmp_path / "folder")
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "usable samples     256\n" in printed and "runs/first is finished after 2 steps" in printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4


@pytest.mark.medium
def test_own_photos_are_searched(undisturbed, tmp_path, monkeypatch):
    monkeypatch.setenv("MODEL", str(undisturbed / "run"))
    monkeypatch.setenv("PHOTOS", str(tmp_path))
    for name, colour in (("red", (255, 0, 0)), ("green", (0, 255, 0)), ("blue", (0, 0, 255)), ("grey", (9, 9, 9))):
        Image.new("RGB", (40, 30), colour).save(tmp_path / f"{name}.png")
    notebook = execute(TUTORIALS / "own_photos.py", tmp_path / "folder")
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert "4 pictures" in "".join(output.get("text", "") for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
