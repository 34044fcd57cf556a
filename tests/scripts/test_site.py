"""The documentation's pages in a browser, and the colours that all HTML pages of reports share."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clipzoo.report.render import TEMPLATES
from tests.support.legible import faults
from tests.support.paths import ROOT

PAGES = (
    "index", "how_to/add_a_head", "configuration", "lab", "benchmarks/heads", "tutorials/first_model",
    "reference/messages", "reference/api", "concepts/objectives",
)  # fmt: skip


def luminance(colour: str) -> float:
    digits = colour * 2 if len(colour) == 3 else colour
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_of_reports_has_a_contrast_of_at_least_four_and_a_half(theme):
    block = re.findall(r":root \{(.*?)\}", (TEMPLATES / "style.css").read_text(), re.DOTALL)[theme]
    light = dict(re.findall(r"--([\w-]+): #(\w+);", block))
    pairs = [
        (text, paper) for text in ("ink", "quiet", "accent", "good", "bad", "variant") for paper in ("paper", "soft")
    ]
    for text, paper in [*pairs, ("on-accent", "accent")]:
        low, high = sorted((luminance(light[text]), luminance(light[paper])))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, paper)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-f", ".mkdocs.yml", "--strict", "--quiet", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    return folder


@pytest.mark.slow
def test_pages_of_the_site_are_readable_in_both_themes_on_a_telephone(site):
    playwright, chromium = pytest.importorskip("playwright.sync_api"), shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for theme in ("light", "dark"):
            # A page of its own for each theme: the site remembers the theme that it was first shown in.
            page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme=theme)
            for name in PAGES:
                page.goto((site / f"{name}.html").as_uri())
                assert faults(page) == [], (name, theme)
