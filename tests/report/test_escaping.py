"""Captions, class names and settings of a run appear in its pages as text."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml

from clipzoo.io.text import latex_text, markdown_code, markdown_text
from clipzoo.report import render
from clipzoo.report.pages import write_pages, write_report
from clipzoo.report.render import Cell, from_template, latex, markdown, text_table
from tests.support.experiments import composed

HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "a|b|c", "`<b>`", "```\n<script>", "[x](javascript:1)",
    "![x](https://host/x.png)", "*bold* _it_ **x**", "a\nb", "a\r\n\n# title", "\\|<i>", "&lt;b&gt; &#60;", "]: https://x",
    '" onmouseover="alert(1)', "a\u2028b",
]  # fmt: skip
TABLE = text_table(["name", "value"], [[text, Cell(text, code=True, note=text)] for text in HOSTILE], left=1)


class Tags(HTMLParser):
    """Collects the names of the tags of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs)


def interpreted(page: str) -> str:
    """The text of a Markdown page without its code and without what a backslash escapes."""
    page = re.sub(r"^```(?:bash)?\n.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"\\\\|\\[`|*_\]]", "", page)
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", page)


def assert_plain(page: str) -> None:
    """Require a Markdown page without tags, and with links to its own figures only."""
    text = interpreted(page)
    assert not re.search(r"<[a-zA-Z/!]|`", text), text
    assert all(target.startswith("report/") for target in re.findall(r"\]\(([^)]*)", text))
    assert not re.search(r"\]: ", text)


def test_a_markdown_table_shows_hostile_text_as_it_is():
    head, dashes, *rows = markdown(TABLE).splitlines()
    assert len(rows) == len(HOSTILE)
    for row in rows:
        assert interpreted(row).count("|") == 3
        assert_plain(row)


@pytest.mark.parametrize("text", HOSTILE)
def test_paragraphs_and_code_spans_show_hostile_text_as_it_is(text):
    line = re.sub(r"[\r\n\u2028]+", " ", text)
    assert_plain(f"seen: {markdown_text(text)} end")
    assert html.unescape(re.sub(r"\\([`|*_\]\\])", r"\1", markdown_text(text))) == line
    code = markdown_code(text)
    assert interpreted(f"seen: {code} end") == "seen:  end" and line in code


def test_ordinary_text_stays_readable():
    for text in ("image_to_text", "CLIP* RN50", "24.17 ± 0.16*", "[0.9, 0.999]", "a -> b", "R&D", "5 * 3", "a < b"):
        assert html.unescape(markdown_text(text)) == text
    assert markdown_code("a_b <c>") == "`a_b <c>`"


def test_html_and_latex_tables_show_hostile_text_as_it_is():
    names = Tags(from_template("table.html.j2", table=TABLE)).names
    assert names <= {"div", "table", "thead", "tbody", "tr", "th", "td", "code", "small"}
    assert latex_text("\\input{a}$x$^~") == r"\textbackslash{}input\{a\}\$x\$\textasciicircum{}\textasciitilde{}"
    assert "\\write" not in latex(text_table(["a"], [["\\write18{rm}"]], left=1))


def of_templates() -> set[str]:
    """Names of the tags of the templates."""
    templates = [path.read_text() for path in render.TEMPLATES.glob("*.html.j2") if "explorer" not in path.name]
    return {"h1", "h2", "h3", *re.findall(r"<(\w+)", "".join([*render.SPANS.values(), *templates]))}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run whose every text is hostile."""
    folder = tmp_path / "runs" / "run"
    (folder / "evaluation" / "zero_shot").mkdir(parents=True)
    plain = composed("wpse/cc3m_clip")
    plain["trainer"]["precision"], plain["data"]["interpolation"] = HOSTILE[0], HOSTILE[1]
    plain["head"]["_target_"] = f"x.{HOSTILE[4]}"
    (folder / "config.yaml").write_text(yaml.safe_dump(plain))
    arrays = {
        "confusion": np.array([[1, 2], [3, 4]]), "class_names": np.array(HOSTILE[:2]),
        "images": np.zeros((0, 9, 9, 3), np.uint8),
        **dict.fromkeys(("labels", "predictions", "margins"), np.zeros(0, np.int64)),
    }  # fmt: skip
    np.savez(folder / "evaluation" / "zero_shot" / "<script>.npz", **arrays)
    (folder / "evaluation" / "missing.json").write_text(json.dumps({HOSTILE[0]: HOSTILE[4]}))
    record = {
        "experiment": HOSTILE[0], "row": "wpse/CC3M/CLIP", "overrides": HOSTILE, "seed": 0, "revision": HOSTILE[3],
        "versions": {HOSTILE[0]: HOSTILE[0]}, "training": {"steps": 9, HOSTILE[1]: 1.0},
        "metrics": {f"zero_shot/{HOSTILE[1]}/top1": 1.0},
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(record))
    return folder


def test_the_page_of_a_hostile_run_holds_no_tag_and_no_link_of_its_own(run):
    page = write_report(run).read_text()
    assert "alert(1)" in page
    assert_plain(page)
    assert {path.name for path in (run / "report").iterdir()} == {"confusion__script_.png"}
    page = (run / "report.html").read_text()
    assert Tags(page).names <= of_templates() and "&lt;script&gt;" in page


@pytest.mark.medium
def test_the_papers_tables_with_a_hostile_run_hold_no_tag_of_its_own_and_its_scale_names_no_file(run, tmp_path):
    (tmp_path / "outside.yaml").write_text("about: {title: secret}")
    record = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps({**record, "overrides": [*HOSTILE, f"scale={tmp_path / 'outside'}"]}))
    page = write_pages([run.parent], ["wpse/1"], tmp_path / "pages").read_text()
    assert Tags(page).names <= of_templates() and "&lt;script&gt;" in page and "secret" not in page
    assert_plain((tmp_path / "pages" / "tables.md").read_text())


def test_a_statistic_cannot_name_a_file_outside_the_run(tmp_path):
    run = tmp_path / "run"
    (run / "evaluation" / "samples").mkdir(parents=True)
    (run / "report" / "samples_x").mkdir(parents=True)
    name = "x/../../../outside"
    statistic = {"seen": 1, "mean": 0.0, "counts": [1.0], "edges": [0.0, 1.0], "highest": [], "lowest": []}
    (run / "evaluation" / "samples.json").write_text(json.dumps({name: statistic}))
    (run / "evaluation" / "samples" / "captions.json").write_text(json.dumps({"1": HOSTILE[0]}))
    write_report(run)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert (run / "report" / "samples_x_.._.._.._outside.png").exists()
