"""Options of `eval`: the lists of the suites, added datasets, datasets of an address, DataComp's average."""

from __future__ import annotations

from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from statistics import fmean
from threading import Thread

import pandas as pd
import pytest

from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.dataset import catalogue, suites
from clipzoo.evaluation.suite import datacomp_average
from clipzoo.report.published import OPEN_CLIP
from clipzoo.runs.record import MetricKey
from tests.support.evaluation_sets import config_of, model_of, suite_of, write_sets

OPTIONS = ("datacomp", "vtab", "clip_benchmark", "robustness", "multilingual", "long_captions", "fairness")


@pytest.mark.parametrize("option", OPTIONS)
def test_a_suite_names_datasets_of_the_catalogue_by_their_kind(option):
    config = config_of("clip", f"eval={option}")["eval"]
    assert config["missing"] == "report"
    for name in config["zero_shot"]:
        assert "metric" in catalogue()[name], name
    for name in config["choice"]:
        assert "examples" in catalogue()[name], name
    for name in config["retrieval"]:
        assert "captions" in catalogue()[name], name


def test_the_suites_have_as_many_datasets_as_their_authors_state():
    counts = {option: sum(map(len, suites()[option].values())) for option in OPTIONS}
    # DataComp's 38; CLIP_benchmark's collections vtab, and vtab+, ImageNet-O, dSprites' y position and retrieval.
    assert counts["datacomp"] == 38 and counts["vtab"] == 19 and counts["clip_benchmark"] == 36 + 2 + 3


def datacomp(values: dict[str, float]) -> dict[MetricKey, float]:
    """Metrics of all datasets of the suite from one value for each."""
    metrics = {}
    for task, names in suites()["datacomp"].items():
        for name in names:
            if task == "choice":
                metrics[MetricKey(task, name, "10_to_12_candidates", "jaccard")] = values[name]
            elif task == "retrieval":
                metrics[MetricKey(task, name, "image_to_text", "recall_at_1")] = values[name] + 7
                metrics[MetricKey(task, name, "text_to_image", "recall_at_1")] = values[name] - 7
            else:
                metrics[MetricKey(task, name, "", catalogue()[name]["metric"])] = values[name]
    return metrics


def test_the_average_of_datacomp_is_that_of_the_published_table():
    """One model's row, whose average open_clip's authors have printed."""
    row = pd.read_csv(OPEN_CLIP / "openclip_results.csv").iloc[0]
    of_column = row.iloc[5:]
    names = [name for names in suites()["datacomp"].values() for name in names]
    assert len(of_column) == len(names) == 38
    average = datacomp_average(datacomp(dict(zip(names, 100 * of_column, strict=True))))
    assert average[MetricKey("datacomp", "", "", "average")] == pytest.approx(100 * row.iloc[4], abs=0.01)
    assert average[MetricKey("datacomp", "", "", "datasets")] == 38


def test_the_average_of_a_part_of_datacomp_states_its_number_and_other_metrics_do_not_count():
    assert datacomp_average({MetricKey("zero_shot", "colours", "", "top1"): 50.0}) == {}
    metrics = {
        MetricKey("zero_shot", "pets", "", "mean_per_class"): 80.0,
        MetricKey("zero_shot", "pets", "", "top1"): 10.0,
        MetricKey("zero_shot", "mnist", "", "top1"): 40.0,
        # One direction is not DataComp's mean.
        MetricKey("retrieval", "coco", "image_to_text", "recall_at_1"): 5.0,
    }
    average = datacomp_average(metrics)
    assert list(average.values()) == [fmean([80.0, 40.0]), 2]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("datasets")
    write_sets(folder)
    return folder


def test_added_datasets_are_measured_by_the_task_of_their_kind(root, tmp_path):
    nothing = {"zero_shot": [], "linear_probe": [], "retrieval": []}
    model = model_of("clip")
    added = suite_of(root, **nothing, add=["colours", "things"]).run(model, tmp_path / "added", World())
    # The diagnosis of the embedding is another list, by default that of retrieval.
    named = {**nothing, "zero_shot": ["colours"], "retrieval": ["things"], "diagnosis": []}
    assert added == suite_of(root, **named).run(model, tmp_path / "named", World())
    assert {key.split("/")[0] for key in added} == {"zero_shot", "retrieval"}
    with pytest.raises(ConfigError, match="no evaluation dataset colour in .*; did you mean colours"):
        suite_of(root, **nothing, add=["colour"]).open()


@pytest.mark.medium
def test_a_suite_of_an_address_has_the_metrics_of_its_folder(root, tmp_path):
    pytest.importorskip("aiohttp", reason="pip install aiohttp")
    handler = partial(SimpleHTTPRequestHandler, directory=str(root))
    handler.log_message = lambda *_: None
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    model = model_of("clip")
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        remote = suite_of(url, cache_folder=str(tmp_path / "cache")).run(model, tmp_path / "remote", World())
    finally:
        server.shutdown()
        server.server_close()
    assert remote == suite_of(root).run(model, tmp_path / "local", World())
