"""The papers' tables with runs, and their pages."""

from __future__ import annotations

import csv
import html.parser
import itertools
import json
import re
import statistics
from pathlib import Path

import pytest
from scipy import stats

from clipzoo.errors import ConfigError
from clipzoo.report.frame import FilledTable, fill, read_frame
from clipzoo.report.pages import write_pages
from clipzoo.report.published import FOLDER, PaperColumn, PaperRow, layout, read_numbers, table, table_names
from clipzoo.report.statistics import rank_sum
from tests.support import damage
from tests.support.paper_runs import write_run

CLIP = "wpse/CC3M/CLIP"
GAUSSIAN = "wpse/CC3M/WPSE Gaussian"


def printed(name: str, row: str, plus: float = 0.0) -> dict[str, float]:
    """The published numbers of a row, increased by `plus`, as metrics of a run."""
    metrics = {}
    for (paper_row, column), number in table(name).numbers.items():
        if paper_row.name == row and len(column.groups) == 1:
            metrics |= {str(key): number.value + plus for key in column.keys}
    return metrics


def filled(root: Path, name: str) -> FilledTable:
    return fill(table(name), read_frame([root]))


def row_of(filled_table: FilledTable, row: str) -> PaperRow:
    return next(paper_row for paper_row in filled_table.table.rows if paper_row.name == row)


def seeds_and_variants(filled_table: FilledTable, row: str) -> tuple[list[int], list[str]]:
    """Seeds of the runs that represent a row, and the differences of its variants."""
    paper_row = row_of(filled_table, row)
    ours = filled_table.ours(paper_row).drop_duplicates("run")
    return ours["seed"].to_list(), list(filled_table.variants(paper_row))


def column_of(filled_table: FilledTable, label: str) -> PaperColumn:
    return next(column for column in filled_table.table.columns if column.label == label)


def test_runs_of_the_rows_experiment_fill_it_with_their_mean_and_deviation_less_the_published_number(tmp_path):
    write_run(tmp_path, "wpse/cc3m_clip", printed("wpse/1", CLIP, plus=1.5))
    filled_table = filled(tmp_path, "wpse/1")
    row = row_of(filled_table, CLIP)
    assert seeds_and_variants(filled_table, CLIP) == ([0], [])
    for column in filled_table.table.columns:
        # The paper's average is rounded, and so are the thirteen numbers that ours is the mean of.
        assert filled_table.difference(row, column) == pytest.approx(1.5, abs=0.01)
    for seed, plus in ((1, 1.0), (2, 5.0)):
        write_run(tmp_path, "wpse/cc3m_clip", printed("wpse/1", CLIP, plus), f"seed={seed}")
    ours = (filled_table := filled(tmp_path, "wpse/1")).measured(row, column_of(filled_table, "ImageNet"))
    assert ours["mean"] == pytest.approx(19.94 + 2.5)
    assert ours["deviation"] == pytest.approx(statistics.stdev([1.5, 1.0, 5.0]))


@pytest.mark.medium
def test_a_run_evaluated_by_another_protocol_is_a_variant_that_names_the_difference(tmp_path):
    metrics = {"zero_shot/imagenet/top1": 20.0, "zero_shot/flowers/mean_per_class": 12.0}
    write_run(tmp_path, "cloob/cc3m_cloob", metrics)
    write_run(tmp_path / "others", "cloob/cc3m_cloob", metrics, "seed=1", "eval.prompts=slip")
    # Flowers has one list of prompts for all papers.
    assert seeds_and_variants(filled(tmp_path, "cloob/1"), "cloob/CC3M/CLOOB RN50 (31 epochs)") == (
        [0], ["eval.prompts of zero_shot/imagenet slip for clip"],
    )  # fmt: skip


def test_a_run_evaluated_on_further_datasets_represents_its_row(tmp_path):
    metrics = {"zero_shot/imagenet/top1": 20.0, "zero_shot/pets/mean_per_class": 12.0}
    path = write_run(tmp_path, "wpse/cc3m_clip", metrics) / "results.json"
    results = json.loads(path.read_text())
    for place, found in (
        ("retrieval/coco", ([0], [])),
        ("zero_shot/pets", ([], ["eval.interpolation of zero_shot/pets bilinear for bicubic"])),
    ):
        results["protocol"].setdefault(place, {})["interpolation"] = "bilinear"
        path.write_text(json.dumps(results))
        assert seeds_and_variants(filled(tmp_path, "wpse/1"), CLIP) == found


def test_a_run_with_another_value_or_too_few_pairs_is_a_variant_that_names_it_and_never_the_row(tmp_path):
    labels = {
        "optim.weight_decay=0.2": "optim.weight_decay 0.2 for 0.5",
        "trainer.global_batch=1024": "trainer.global_batch 1024 for 2048",
        "head.learnable_temperature=false": "head.learnable_temperature False for True",
    }
    for override in labels:
        write_run(tmp_path, "wpse/cc3m_clip", printed("wpse/1", CLIP), override)
    write_run(tmp_path, "wpse/cc3m_clip", printed("wpse/1", CLIP), pairs=1_000_000)
    seeds, variants = seeds_and_variants(filled(tmp_path, "wpse/1"), CLIP)
    (few,) = set(variants) - set(labels.values())
    assert not seeds and len(variants) == 4
    assert "training pairs" in few and few.endswith("for 2,300,000 to 3,400,000")


@pytest.mark.medium
def test_places_costs_and_seeds_make_no_variant_but_another_scale_does_and_has_no_costs(tmp_path):
    changes = ("data.workers=9", "trainer.micro_batch=128", "data.shards=elsewhere.tar", "seed=7")
    write_run(tmp_path / "same", "wpse/cc3m_clip", printed("wpse/1", CLIP), *changes)
    assert seeds_and_variants(filled(tmp_path / "same", "wpse/1"), CLIP) == ([7], [])
    metrics = printed("kme/3", "kme/CC3M/KME-CLIP")
    write_run(tmp_path / "demo", "kme/cc3m_kme", metrics, "scale=demo")
    assert seeds_and_variants(filled(tmp_path / "demo", "kme/3"), "kme/CC3M/KME-CLIP") == ([], ["scale=demo"])
    assert not filled(tmp_path / "demo", "kme/7").is_measured


def test_the_best_point_of_a_search_by_the_papers_criterion_stands_for_the_row(tmp_path):
    for width, plus in ((0.75, 2.0), (2.0, 9.0)):
        write_run(tmp_path, "wpse/cc3m_gaussian", printed("wpse/1", GAUSSIAN, plus), f"head.kernel.width={width}")
    filled_table = filled(tmp_path, "wpse/1")
    row = row_of(filled_table, GAUSSIAN)
    assert "the only point run" in filled_table.selected[row.place]
    # A value outside the search is a variant.
    assert seeds_and_variants(filled_table, GAUSSIAN) == ([0], ["head.kernel.width 2.0 for 0.75"])
    for width, plus in ((0.5, 0.0), (1.0, 1.0)):
        write_run(tmp_path, "wpse/cc3m_gaussian", printed("wpse/1", GAUSSIAN, plus), f"head.kernel.width={width}")
    filled_table = filled(tmp_path, "wpse/1")
    assert filled_table.measured(row, column_of(filled_table, "ImageNet"))["mean"] == pytest.approx(21.20 + 2.0)
    selected = filled_table.selected[row.place]
    assert "head.kernel.width=0.75" in selected
    assert "the best of 3 points" in selected and "of 15 that the paper searched" in selected


def test_the_same_training_fills_the_row_of_another_paper(tmp_path):
    write_run(tmp_path, "wpse/cc3m_clip", printed("kme/2", "kme/CC3M/CLIP"))
    filled_table = filled(tmp_path, "kme/2")
    assert set(filled_table.ours(row_of(filled_table, "kme/CC3M/CLIP"))["row"]) == {CLIP}


def test_the_rank_sum_test_counts_arrangements_and_that_of_many_seeds_is_scipys_approximation():
    assert rank_sum([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(2 / 252)
    assert rank_sum([1, 2, 3], [4, 5, 6]) == pytest.approx(0.1)
    assert rank_sum([1.0, 1.0], [1.0, 1.0]) == 1.0
    first, second = [2.1, 3.4, 0.3, 9.9], [5.0, 4.1, 8.8]
    sums = [sum(1 + rank for rank in chosen) for chosen in itertools.combinations(range(7), 4)]
    rank_of_first = sum(1 + sorted(first + second).index(value) for value in first)
    assert rank_sum(first, second) == pytest.approx(
        sum(abs(total - 16) >= abs(rank_of_first - 16) for total in sums) / len(sums)
    )
    first, second = [value * 1.0 for value in range(15)], [value + 4.5 for value in range(15)]
    expected = stats.mannwhitneyu(first, second, method="asymptotic", use_continuity=True).pvalue
    assert rank_sum(first, second) == pytest.approx(expected, rel=1e-9)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """Rows with five seeds, a variant, a row at scale=demo with evaluations during training, an unfinished run."""
    runs = tmp_path_factory.mktemp("runs")
    for seed in range(5):
        for row, experiment in (("CLIP", "cloob/cc3m_clip"), ("CLOOB", "cloob/cc3m_cloob")):
            metrics = printed("cloob/1", f"cloob/CC3M/{row} RN50 (31 epochs)", 0.1 * seed)
            write_run(runs, experiment, metrics, f"seed={seed}")
    write_run(runs, "wpse/cc3m_clip", printed("wpse/1", CLIP), "optim.weight_decay=0.2")
    metrics = {"zero_shot/shapes/top1": 50.0, "zero_shot/colours/top1": 70.0, "linear_probe/shapes/before/top1": 60.0,
               "retrieval/scenes/image_to_text/recall_at_1": 30.0}  # fmt: skip
    write_run(runs, "kme/cc3m_kme", metrics, "scale=demo", evaluations=3)
    half = write_run(runs, "nuclr/cc3m_clip", {})
    (half / "results.json").unlink()
    return write_pages([runs], [], runs / "report")


class Reader(html.parser.HTMLParser):
    """Collects every address that the page would load, and checks that tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.loads += [value for key, value in attrs if key in ("src", "href", "srcset", "data")]
        self.open += [tag] if tag not in ("meta", "img", "br", "link") else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.medium
def test_the_page_needs_no_other_file(page):
    text, reader = page.read_text(), Reader()
    reader.feed(text)
    assert not reader.open
    assert any(address.startswith("data:image/png;base64,") for address in reader.loads)
    assert all(address.startswith(("data:", "#")) for address in reader.loads)
    assert not any(word in text for word in ("<script", "@import", "url("))
    anchors = set(re.findall(r'id="([^"]+)"', text))
    assert {address[1:] for address in reader.loads if address.startswith("#")} <= anchors


@pytest.mark.medium
def test_the_page_lists_missing_rows_with_their_commands_and_compares_runs_at_another_scale(page):
    text = page.read_text()
    for words in (
        "clipzoo train -m experiment=cloob/cc3m_cloob_128 seed=0,1,2,3,4", "255 H100 hours, 5 runs", "unfinished",
        "variant: optim.weight_decay 0.2 for 0.5", "evaluations during training",
    ):  # fmt: skip
        assert words in text
    text = (page.parent / "tables.md").read_text()
    assert "## At scale=demo" in text and re.search(r"\| KME-CLIP \| KME-CLIP \| 60\.00 \| ", text)


@pytest.mark.medium
def test_every_format_holds_the_numbers_and_the_test_of_significance_and_latex_is_escaped(page):
    # Five seeds against five, all apart on ImageNet (20.33 and 23.97, 0.1 apart): p = 2 / 252.
    for name in ("tables.md", "tables.tex", "index.html"):
        text = (page.parent / name).read_text()
        assert "24.17" in text and "24.17 ± 0.16*" in text.replace("$\\pm$", "±"), name
    rows = csv.DictReader((page.parent / "tables.csv").read_text().splitlines())
    places = {(row["table"], row["model"], row["column"]): row for row in rows}
    cell = places["cloob/1", "CLOOB RN50 (31 epochs)", "ImageNet"]
    assert cell["state"] == "row" and cell["runs"] == "5"
    assert float(cell["p_value"]) == pytest.approx(2 / 252, abs=1e-4)
    assert float(cell["difference"]) == pytest.approx(0.2)
    text = (page.parent / "tables.tex").read_text()
    for columns, content in re.findall(r"\\begin{tabular}{(\w+)}(.+?)\\end{tabular}", text, re.DOTALL):
        for line in content.splitlines():
            assert not line.endswith("\\\\") or len(re.findall(r"(?<!\\)&", line)) == len(columns) - 1
    assert not re.search(r"(?<!\\)[#%_]", text.replace("\\begin{table}", ""))


@pytest.mark.medium
def test_damaged_runs_are_named_in_the_page_and_the_rest_is_shown(tmp_path, blank_pictures):
    runs = [
        write_run(tmp_path, "kme/cc3m_kme", {"zero_shot/shapes/top1": 50.0}, "scale=demo", f"seed={seed}")
        for seed in range(2 * len(damage.KINDS) + 1)
    ]
    faulty = []
    for number, (run, kind) in enumerate(zip(runs[1:], damage.KINDS * 2, strict=True)):
        faulty.append(run / ("config.yaml" if number % 2 else "results.json"))
        kind(faulty[-1])
    arrays = runs[0] / "evaluation" / "zero_shot" / "shapes.npz"
    arrays.parent.mkdir(parents=True)
    arrays.write_bytes(b"random")
    page = write_pages([tmp_path], [], tmp_path / "report").with_name("tables.md").read_text()
    assert re.search(rf"\| {re.escape(runs[0].name)} +\| kme/CC3M/", page)
    for path in faulty:
        assert re.search(rf"\| {re.escape(str(path))} .*damaged: ", page), path
    assert f"{runs[0].name}/evaluation/zero_shot/shapes.npz" in page


def test_tables_without_runs_are_shown_on_request_and_are_an_error_otherwise(tmp_path):
    with pytest.raises(ConfigError, match="--table"):
        write_pages([tmp_path], [], tmp_path / "report")
    text = write_pages([tmp_path], ["wpse/3", "nuclr/1"], tmp_path / "report").read_text()
    assert "WPSE, table 3" in text and "No published numbers" in text


def test_every_published_number_is_in_a_table():
    files = {name: layout()["tables"][name].get("numbers", []) for name in table_names()}
    listed = {file for part in files.values() for file in part}
    assert listed == {path.name for path in FOLDER.glob("*.csv")}
    for name, part in files.items():
        assert len(table(name).numbers) == sum(len(read_numbers(file)) for file in part), name
