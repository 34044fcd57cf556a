"""One style for all HTML pages: readable in both themes, on a telephone, without any other file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from clipzoo.report.pages import write_report
from clipzoo.report.render import TEMPLATES

STYLE = (TEMPLATES / "style.css").read_text()
LIGHT, DARK = (dict(re.findall(r"--([\w-]+): (#\w+)", block)) for block in re.findall(r":root \{(.*?)\}", STYLE, re.S))


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    channels = np.array([int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)])
    linear = np.where(channels <= 0.03928, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_has_a_contrast_of_at_least_four_and_a_half(theme):
    pairs = [
        (text, back) for text in ("ink", "quiet", "accent", "good", "bad", "variant") for back in ("paper", "soft")
    ]
    low = {pair: contrast(*(theme[name] for name in pair)) for pair in [*pairs, ("on-accent", "accent")]}
    assert {pair: value for pair, value in low.items() if value < 4.5} == {}


def test_all_colours_have_a_value_in_both_themes_and_only_the_explorer_has_others():
    styles = STYLE + (TEMPLATES / "explorer.css").read_text() + (TEMPLATES / "explorer.js").read_text()
    assert LIGHT.keys() == DARK.keys() == set(re.findall(r"var\(--([\w-]+)\)", styles))
    for path in TEMPLATES.glob("*.html.j2"):
        assert not re.search(r"#[0-9a-f]{3,6}\b(?!;)|style=", path.read_text()), path


def test_the_page_of_a_run_is_one_file_with_a_language_a_title_and_a_text_for_each_picture(tmp_path: Path):
    (run := tmp_path / "a < b").mkdir()
    lines = [{"step": step, "loss": 4 / step, "lr": 1e-3, "samples_per_second": 9.0 + step} for step in range(1, 9)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "![training curves](report/training.png)" in write_report(run).read_text()
    page = (run / "report.html").read_text()
    assert page.startswith('<!doctype html>\n<html lang="en">') and "<title>a &lt; b</title>" in page
    (picture,) = re.findall(r"<img ([^>]*)>", page)
    assert re.fullmatch(r'class="figure" alt="training curves" src="data:image/png;base64,[\w+/=]+"', picture)
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in page
    assert not re.search(r"(?:src|href)=\"(?!data:)[^\"#]", page) and "<script" not in page
