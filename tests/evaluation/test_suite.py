"""The suite on datasets on disk: ranks, cached results, schedule, files that it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from clipzoo.build import build_part
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets import tar
from clipzoo.evaluation.datasets.dataset import Images, LabelledSplit
from clipzoo.evaluation.datasets.tar import write_classification, write_retrieval
from clipzoo.evaluation.encoder import gathered_batches
from clipzoo.types import Progress
from tests.support.evaluation_sets import config_of, model_of, picture, png, suite_of, write_sets
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("datasets")
    write_sets(folder)
    return folder


HEADS = ["wpse", "kme"]
TWO_CLASSES = {"class_names": ["a", "b"], "templates": ["{c}"], "metric": "top1", "recipe": ""}


def run_suite(root: Path, output: Path, heads: list[str], world: World, shift: float = 0.0) -> list[dict[str, float]]:
    """Metrics of each head. shift: added to a buffer of the encoder."""
    torch.set_num_threads(1)
    metrics = []
    for head in heads:
        model = model_of(head)
        model.encoder._shift += shift
        metrics.append(suite_of(root).run(model, output / head, world))
    return metrics


def run_suite_on_a_rank(root: Path, output: Path, heads: list[str]) -> tuple[list[dict[str, float]], list[int]]:
    """Metrics with a buffer that differs on the second rank, as batch norm's do, and integers that bf16 would round.

    Training sends embeddings in bf16 here; evaluation must not.
    """
    world = replace(World.from_process_group(), gather_dtype=torch.bfloat16)
    if world.is_first:
        (output / "late").mkdir(parents=True)
    world.barrier()
    assert (output / "late").exists()
    numbers = torch.arange(1000)
    batches = gathered_batches(len(numbers), 300, lambda rows: [numbers[list(rows)]], world)
    gathered = torch.cat([batch[0] for batch in batches]).tolist()
    return run_suite(root, output, heads, world, world.rank), gathered


@pytest.mark.medium
def test_two_ranks_return_the_metrics_of_one_on_every_rank(root, tmp_path):
    one = run_suite(root, tmp_path / "one", HEADS, World())
    (first, numbers), (second, _) = run_ranks(2, run_suite_on_a_rank, root, tmp_path / "two", HEADS)
    assert first == second == one
    assert numbers == list(range(1000))
    for head in HEADS:
        alone, together = ((tmp_path / name / head / "zero_shot" / "colours.npz") for name in ("one", "two"))
        assert np.array_equal(np.load(alone)["confusion"], np.load(together)["confusion"])


@pytest.mark.medium
def test_metric_keys_and_output_files(root, tmp_path):
    metrics = suite_of(root).run(model_of("clip"), tmp_path, World())
    expected = {f"zero_shot/colours/{metric}" for metric in ("top1", "top5", "mean_per_class")}
    expected |= {f"linear_probe/colours/{where}/top1" for where in ("before", "after")}
    ways, cuts = ("image_to_text", "text_to_image"), (1, 5, 10)
    expected |= {f"retrieval/things/{way}/recall_at_{cut}" for way in ways for cut in cuts}
    expected |= {f"retrieval/things_paired/image_to_text/recall_at_{cut}" for cut in cuts}
    assert expected <= set(metrics)
    assert all(0 <= value <= 100 for name, value in metrics.items() if not name.startswith("diagnosis/"))
    confusion = np.load(tmp_path / "zero_shot" / "colours.npz")["confusion"]
    assert confusion.sum() == 33
    assert 100 * confusion.trace() / 33 == pytest.approx(metrics["zero_shot/colours/top1"])
    search = json.loads((tmp_path / "linear_probe" / "colours.search.json").read_text())
    assert search["before"]["metrics"]["top1"] == metrics["linear_probe/colours/before/top1"]
    answers = np.load(tmp_path / "linear_probe" / "colours.npz")
    for projection in ("before", "after"):
        right = answers[f"all_{projection}"] == answers["all_labels"]
        assert 100 * right.mean() == pytest.approx(metrics[f"linear_probe/colours/{projection}/top1"])
    assert not (tmp_path / "features" / "colours").exists()


class Counting(Images):
    """Images that count how often they are read."""

    reads = 0

    def __init__(self, inner) -> None:
        self.inner, self.fingerprint = inner, inner.fingerprint

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index):
        Counting.reads += 1
        return self.inner[index]


@pytest.fixture
def counted(monkeypatch):
    Counting.reads = 0
    plain = tar.open_tar_dataset

    def open_counting(root, name, *column):
        dataset = plain(root, name, *column)
        if name != "colours":
            return dataset
        splits = {split: LabelledSplit(Counting(part.images), part.labels) for split, part in dataset.splits.items()}
        return replace(dataset, splits=splits)

    monkeypatch.setattr(tar, "open_tar_dataset", open_counting)
    return Counting


@pytest.mark.medium
def test_a_finished_dataset_is_not_evaluated_again_for_the_same_weights_and_settings(root, tmp_path, counted):
    model = model_of("clip")
    first = suite_of(root).run(model, tmp_path, World())
    reads = counted.reads
    assert reads > 0
    assert suite_of(root).run(model, tmp_path, World()) == first
    assert counted.reads == reads
    with torch.no_grad():
        next(model.parameters()).mul_(1.1)
    suite_of(root).run(model, tmp_path, World())
    assert counted.reads > reads
    reads = counted.reads
    suite_of(root, interpolation="bilinear").run(model, tmp_path, World())
    assert counted.reads > reads


@pytest.mark.medium
def test_an_interrupted_evaluation_resumes_after_its_finished_datasets(root, tmp_path, counted, monkeypatch):
    model = model_of("clip")
    whole = suite_of(root).run(model, tmp_path / "whole", World())
    with monkeypatch.context() as patch:
        patch.setattr("clipzoo.evaluation.probe.probe", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            suite_of(root).run(model, tmp_path / "cut", World())
    reads = counted.reads
    # Zero-shot's result and the probe's features are on disk: no image is read again.
    assert suite_of(root).run(model, tmp_path / "cut", World()) == whole
    assert counted.reads == reads


@pytest.mark.medium
def test_results_and_features_of_another_decoding_of_images_are_not_used(root, tmp_path, counted, monkeypatch):
    model, suite = model_of("clip"), suite_of(root, keep_features=True)
    with monkeypatch.context() as patch:
        patch.setattr("clipzoo.evaluation.datasets.dataset.DECODING", "without the alpha channel")
        suite.run(model, tmp_path, World())
    reads = counted.reads
    suite.run(model, tmp_path, World())
    assert counted.reads == 2 * reads


def test_a_dataset_whose_templates_changed_is_evaluated_again(tmp_path):
    write_sets(tmp_path / "sets")
    model, run = model_of("clip"), tmp_path / "run"
    suite_of(tmp_path / "sets", linear_probe=[]).run(model, run, World())
    cached = {path: path.read_text() for path in run.glob("*/*.json")}
    (tmp_path / "sets" / "colours" / "zeroshot_classification_templates.txt").write_text("no more than {c}\n")
    suite_of(tmp_path / "sets", linear_probe=[]).run(model, run, World())
    changed = {path.stem for path, before in cached.items() if path.read_text() != before}
    assert changed == {"colours"} and {path.stem for path in cached} == {"colours", "things"}


def test_the_model_returns_to_its_mode(root, tmp_path):
    suite, model = suite_of(root, linear_probe=[], retrieval=[]), model_of("clip")
    for training in (True, False):
        model.train(training)
        suite.run(model, tmp_path, World())
        assert model.training is training
        assert all(not parameter.grad_fn for parameter in model.parameters())


def test_a_suite_without_datasets_measures_nothing(tmp_path):
    suite = build_part(config_of("clip")["eval"])
    suite.open()
    assert suite.run(model_of("clip"), tmp_path / "never", World()) == {}
    assert not (tmp_path / "never").exists()


def test_an_evaluation_is_due_at_every_multiple_of_every_epochs():
    # Six steps of half an epoch.
    points = [Progress(step, 6, samples=16, global_batch=8) for step in range(7)]
    for every, expected in {None: [], 1.0: [2, 4, 6], 0.5: [1, 2, 3, 4, 5, 6], 1.5: [3, 6], 5.0: []}.items():
        suite = suite_of(Path("nowhere"), every_epochs=every)
        assert [step for step in range(1, 7) if suite.due(points[step - 1], points[step])] == expected


def test_all_missing_datasets_are_named_before_any_is_evaluated(tmp_path):
    with pytest.raises(ConfigError) as raised:
        suite_of(tmp_path, zero_shot=["colours", "food101"], linear_probe=[], retrieval=["coco"]).open()
    text = str(raised.value)
    assert "no evaluation dataset colours" in text
    assert f"d.Food101('{tmp_path}/food101', download=True)" in text
    assert "dataset_coco.json" in text


def test_missing_datasets_are_reported_if_asked_and_the_others_evaluated_in_this_process_or_in_workers(root, tmp_path):
    suite = suite_of(root, zero_shot=["pets", "colours"], linear_probe=[], retrieval=[], missing="report")
    suite.open()
    metrics = suite.run(model_of("clip"), tmp_path, World())
    assert {key.split("/")[1] for key in metrics} == {"colours"}
    in_workers = suite_of(root, linear_probe=[], retrieval=[], workers=2)
    assert in_workers.run(model_of("clip"), tmp_path / "workers", World()) == metrics
    assert "OxfordIIITPet" in json.loads((tmp_path / "missing.json").read_text())["pets"]


def test_a_dataset_without_the_splits_classes_or_captions_of_its_task_is_refused(root, tmp_path):
    with pytest.raises(ConfigError, match="colours has classes .*: move it from eval.retrieval to eval.zero_shot"):
        suite_of(root, retrieval=["colours"]).open()
    with pytest.raises(ConfigError, match="things has captions .*: move it from eval.zero_shot to eval.retrieval"):
        suite_of(root, zero_shot=["things"]).open()
    write_classification(tmp_path / "tested", splits={"test": [(image(0), 0), (image(1), 1)]}, **TWO_CLASSES)
    with pytest.raises(ConfigError, match="tested has no split train: add it, or remove tested from eval.linear_probe"):
        suite_of(tmp_path, zero_shot=[], linear_probe=["tested"], retrieval=[]).open()
    tasks = {"zero_shot": ["tested"], "linear_probe": ["tested"], "retrieval": []}
    suite = suite_of(tmp_path, **tasks, missing="report")
    suite.open()
    metrics = suite.run(model_of("clip"), tmp_path / "out", World())
    assert {key.rpartition("/")[0] for key in metrics} == {"zero_shot/tested"}
    assert "split train" in json.loads((tmp_path / "out" / "missing.json").read_text())["tested"]


def test_faults_of_a_dataset_are_found_before_the_evaluation(tmp_path):
    write_retrieval(tmp_path / "uneven", recipe="", examples=[(image(0), ["one", "two"]), (image(1), ["one"])])
    with pytest.raises(ConfigError, match="uneven: images have 1 to 2 captions.*eval.paired=false"):
        suite_of(tmp_path, zero_shot=[], linear_probe=[], retrieval=["uneven"]).open()
    suite_of(tmp_path, zero_shot=[], linear_probe=[], retrieval=["uneven"], paired=False).open()
    write_classification(tmp_path / "half", splits={"test": [(image(0), 1)]}, **TWO_CLASSES)
    with pytest.raises(ConfigError, match=r"half, test: 1 of 2 classes have no sample \('a'\)"):
        suite_of(tmp_path, zero_shot=["half"], linear_probe=[], retrieval=[]).open()


def image(seed: int) -> bytes:
    return png(picture((seed, seed, seed), seed))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number from 1 to 1000000000, not 0"),
        ({"draws": 0}, "draws must be a whole number from 1 to 1000000000"),
        ({"probe_resize": 0.5}, "probe_resize must be a number from 1 to 10, not 0.5"),
        ({"probe_validation": 1.0}, "probe_validation must be a number of at least 0.001 and below 1, not 1.0"),
        ({"every_epochs": 0.0}, "every_epochs must be a number above 0"),
    ],
)
def test_impossible_settings_are_refused_with_their_key(change, expected):
    with pytest.raises(ConfigError, match=expected):
        suite_of(Path("nowhere"), **change)
