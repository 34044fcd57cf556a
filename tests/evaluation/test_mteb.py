"""Models as encoders of mteb: its scores on tasks in memory against our evaluators and direct computations."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.cluster import MiniBatchKMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import v_measure_score

import clipzoo
from clipzoo import io
from clipzoo.build import build_part
from clipzoo.cli.evaluate import evaluate
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.evaluation.encoder import Transform
from clipzoo.evaluation.retrieval import retrieval
from clipzoo.evaluation.suite import Suite
from clipzoo.evaluation.task import Evaluation
from clipzoo.evaluation.zero_shot import zero_shot
from clipzoo.loading import LoadedModel
from clipzoo.runs.record import RunRecord, written
from clipzoo.types import concatenate
from tests.support.evaluation_sets import IMAGE_SIZE, batch_encoder, classes, config_of, gallery, model_of
from tests.support.ranks import run_ranks

mteb = pytest.importorskip("mteb", reason="mteb is not installed: `make test-mteb` installs it")
from clipzoo.evaluation.mteb import MtebEncoder, evaluate_tasks, open_task  # noqa: E402
from tests.support import mteb_tasks as tasks  # noqa: E402

pytestmark = pytest.mark.medium
"""The import of mteb takes several seconds."""
HEADS = ["clip", "wpse", "kme", "filip", "distance", "meru"]


def encoder_of(model) -> MtebEncoder:
    return MtebEncoder(model, batch_encoder(batch_size=7), "clipzoo/test", "0")


def scores_of(model, task) -> dict[str, float]:
    result = mteb.evaluate(
        encoder_of(model), task, cache=None, co2_tracker=False, encode_kwargs={"batch_size": 7}, show_progress_bar=False
    )
    return next(iter(result.task_results[0].scores.values()))[0]


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_zero_shot_accuracy_of_any_head_is_that_of_our_evaluator(head):
    model, data = model_of(head), tasks.one_template(classes())
    ours = zero_shot(model, data, batch_encoder(batch_size=7), IMAGE_SIZE, draws=1).metrics
    for task in (tasks.Colours(), tasks.OtherColours()):
        scores = scores_of(model, task)
        assert 100 * scores["accuracy"] == pytest.approx(ours["top1"], abs=1e-12)
        # Every class has samples: mteb's macro recall is our mean per class.
        assert 100 * scores["recall"] == pytest.approx(ours["mean_per_class"], abs=1e-9)


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_retrieval_in_both_directions_has_the_hits_of_our_evaluator(head):
    model, data = model_of(head), gallery()
    ours = retrieval(model, data, batch_encoder(batch_size=7), draws=1, paired=False).metrics
    for task, way in ((tasks.Pictures(), "text_to_image"), (tasks.Captions(), "image_to_text")):
        scores = scores_of(model, task)
        for cut in (1, 5, 10):
            # mteb's recall is the share of an image's captions among the first; ours counts an image with any of them.
            assert 100 * scores[f"hit_rate_at_{cut}"] == pytest.approx(ours[way][f"recall_at_{cut}"], abs=0.0006)


@torch.no_grad()
def similarity_of_images(model, images) -> np.ndarray:
    transform = Transform(IMAGE_SIZE, IMAGE_SIZE, "bicubic")
    rows = model.encode_image(torch.stack([transform(image) for image in images]))
    return model.similarity(rows, rows).numpy()


@torch.no_grad()
def similarity_of(model, images, captions) -> np.ndarray:
    """One image and one caption at a time."""
    encoder, transform = batch_encoder(), Transform(IMAGE_SIZE, IMAGE_SIZE, "bicubic")
    texts = [model.encode_text(encoder.tokenizer([caption])) for caption in captions]
    rows = [model.encode_image(transform(image)[None]) for image in images]
    return np.array([[model.similarity(row, text).item() for text in texts] for row in rows])


@pytest.mark.parametrize("head", HEADS)
def test_choices_among_ranked_images_and_compositional_pairs_equal_a_loop_over_single_scores(head, monkeypatch):
    model, data = model_of(head), gallery()
    scores = similarity_of(model, data.images, data.captions)
    hits = []
    for caption, image in enumerate(data.caption_image):
        candidates = [(image + step) % len(data.images) for step in (2, 0, 5)]
        hits.append(max(candidates, key=lambda one: scores[one, caption]) == image)
    assert scores_of(model, tasks.Choices())["hit_rate_at_1"] == pytest.approx(np.mean(hits), abs=6e-6)

    # 7 axes for up to 90 captions: those of different samples share axes.
    monkeypatch.setattr("clipzoo.evaluation.mteb.MOST_CAPTIONS", 3)
    for task in (tasks.Compositions(), tasks.Negatives()):
        task.load_data()
        of_images, of_texts = [], []
        for row in task.dataset["test"]:
            sides = ([row[name] for name in names] for names in (task.images_column_names, task.texts_column_names))
            part = similarity_of(model, *sides)
            of_texts.append((part.argmax(axis=1) == np.arange(part.shape[0])).all())
            of_images.append((part.argmax(axis=0) == np.arange(part.shape[1])).all())
        measured = scores_of(model, task)
        assert 0 < measured["text_acc"] < 1
        assert measured["text_acc"] == pytest.approx(np.mean(of_texts))
        assert measured["image_acc"] == pytest.approx(np.mean(of_images))
        assert measured["accuracy"] == pytest.approx(np.mean(np.logical_and(of_images, of_texts)))


@pytest.mark.parametrize("head", ["clip", "kme"])
@torch.no_grad()
def test_probes_and_clusters_are_of_the_vectors_of_our_probe(head):
    model, data = model_of(head), classes()
    transform = Transform(IMAGE_SIZE, IMAGE_SIZE, "bicubic")
    vectors = {}
    for name, split in data.splits.items():
        pixels = torch.stack([transform(image) for image in split.images])
        vectors[name] = model.head.probe(model.image_features(pixels), "after").numpy()
    clusters = MiniBatchKMeans(len(data.class_names), batch_size=500, n_init="auto", random_state=42)
    found = clusters.fit(vectors["test"]).labels_
    labels = data.splits["test"].labels
    measured = scores_of(model, tasks.ColourClusters())
    assert measured["v_measure"] == pytest.approx(v_measure_score(labels, found))

    # All six train samples of a class are drawn in both experiments, in an order without effect on the optimum.
    fitted = LogisticRegression(max_iter=100).fit(vectors["train"], data.splits["train"].labels)
    measured = scores_of(model, tasks.ColourProbe())
    assert measured["accuracy"] == pytest.approx(fitted.score(vectors["test"], labels))


@torch.no_grad()
def test_images_with_images_and_images_with_captions_retrieve_by_the_score_of_the_head():
    for head in ("clip", "kme"):
        model, data = model_of(head), gallery()
        transform = Transform(IMAGE_SIZE, IMAGE_SIZE, "bicubic")
        images = model.encode_image(torch.stack([transform(image) for image in data.images]))
        texts = model.encode_text(batch_encoder().tokenizer([f"i{index} thing" for index in range(len(images))]))
        queries = [model.head.ensemble(concatenate([images[row : row + 1], texts[row : row + 1]]))
                   for row in range(len(images))]  # fmt: skip
        same = torch.arange(len(images))
        for task, scores in (
            (tasks.SamePictures(), model.similarity(images, images)),
            (tasks.CaptionedPictures(), model.similarity(images, concatenate(queries)).mT),
        ):
            hits = (scores.argmax(dim=1) == same).double().mean().item()
            assert scores_of(model, task)["hit_rate_at_1"] == pytest.approx(hits, abs=6e-6)


def test_similar_images_are_compared_by_the_cosine_of_heads_whose_score_is_one():
    model, data = model_of("clip"), gallery()
    scores = similarity_of_images(model, data.images)
    pairs = [scores[index, index + 1] for index in range(12)]
    expected = spearmanr(pairs, np.arange(12)).statistic
    measured = scores_of(model, tasks.SimilarColours())
    assert measured["cosine_spearman"] == pytest.approx(expected)
    assert measured["spearman"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("head", "task", "words"),
    [
        ("wpse", tasks.SimilarColours, "SimilarColours, VisualSTS.eng., compares cosines, and the score is not a"),
        ("filip", tasks.SamePictures, "FilipHead compares images with captions only"),
        ("filip", tasks.CaptionedPictures, "embeds images together with captions: leave the task out for FilipHead"),
        ("kme", tasks.CaptionClasses, "needs vectors, and captions are sets of points"),
    ],
)
def test_task_types_that_a_head_cannot_serve_are_refused(head, task, words):
    with pytest.raises(ConfigError, match=words):
        scores_of(model_of(head), task())


COMMAND = ["eval=none", "eval.mteb=[{_target_:tests.support.mteb_tasks.Colours}]", "device=cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """An exported model; its evaluation has a folder of its own."""
    folder = tmp_path_factory.mktemp("model")
    clipzoo.export(LoadedModel(model_of("clip").float(), config_of("clip")), folder)
    return folder


def test_the_command_writes_scores_to_the_record_and_page_and_does_not_repeat_a_finished_task(run, tmp_path):
    command = [*COMMAND, f"model=local-dir:{run}", f"output={tmp_path / 'out'}"]
    metrics = evaluate(command)
    ours = zero_shot(model_of("clip").float(), tasks.one_template(classes()), batch_encoder(), IMAGE_SIZE, draws=1)
    assert metrics == {"mteb/Colours/accuracy": pytest.approx(ours.metrics["top1"], abs=1e-3)}
    record = RunRecord.read(tmp_path / "out")
    assert written(record.metrics) == metrics
    stored = json.loads((tmp_path / "out" / "evaluation" / "mteb" / "Colours.json").read_text())
    assert 100 * stored["scores"]["test"][0]["accuracy"] == metrics["mteb/Colours/accuracy"]
    assert "MTEB, %" in (tmp_path / "out" / "report.md").read_text()
    stored["metrics"]["mteb/Colours/accuracy"] = 1.5
    io.write_json(tmp_path / "out" / "evaluation" / "mteb" / "Colours.json", stored)
    assert evaluate(command) == {"mteb/Colours/accuracy": 1.5}
    assert evaluate([*command, "eval.precision=bf16"]) != {"mteb/Colours/accuracy": 1.5}


def test_unknown_tasks_and_missing_data_are_one_message(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, words in (("CIFAR10ZeroShots", "Did you mean"), ("CIFAR10ZeroShot", "CIFAR10ZeroShot cannot be opened")):
        with pytest.raises(ConfigError, match=words):
            open_task(name)


def test_an_encoder_of_a_loaded_model_has_its_transform_and_the_digest_of_its_weights():
    model = LoadedModel(model_of("clip").float(), config_of("clip")).eval()
    first, again = clipzoo.mteb(model), clipzoo.mteb(model)
    assert isinstance(first, mteb.EncoderProtocol)
    assert first.mteb_model_meta.revision == again.mteb_model_meta.revision
    with torch.no_grad():
        model.head.log_scale += 0.5
    assert clipzoo.mteb(model).mteb_model_meta.revision != first.mteb_model_meta.revision


def test_mteb_is_imported_only_on_request():
    code = "import sys, clipzoo.evaluation.suite, clipzoo.loading; clipzoo.mteb; sys.exit('mteb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_task_leaves_the_random_numbers_of_torch_alone(tmp_path):
    task = tasks.ColourClusters()
    evaluation = Evaluation(model_of("clip"), batch_encoder(), 1, tmp_path)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    evaluate_tasks([open_task(task)], evaluation, "key")
    assert torch.equal(torch.rand(3), expected)


def evaluate_on_a_rank(output: Path) -> dict[str, float]:
    encoder = replace(batch_encoder(), world=World.from_process_group())
    suite = suite_of(output, mteb=[tasks.Colours(), tasks.Captions()])
    return suite.run(model_of("kme"), output, encoder.world)


def test_two_ranks_return_the_scores_of_one(tmp_path):
    one = suite_of(tmp_path, mteb=[tasks.Colours(), tasks.Captions()]).run(model_of("kme"), tmp_path / "1", World())
    assert set(one) == {"mteb/Colours/accuracy", "mteb/Captions/hit_rate_at_1"}
    assert run_ranks(2, evaluate_on_a_rank, tmp_path / "2") == [one, one]


def suite_of(root: Path, **changes) -> Suite:
    node = config_of("clip", "eval=none", f"eval.root={root}")["eval"]
    return build_part({**node, "workers": 0, "batch_size": 7, **changes})
