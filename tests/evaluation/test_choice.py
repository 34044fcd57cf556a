"""Choice between images and captions compared with the benchmarks' own rules, one example at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import jaccard_score

from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.evaluation.choice import SCORES, Choice, example_scores
from clipzoo.evaluation.datasets.dataset import ChoiceDataset, Example, check_examples
from clipzoo.evaluation.datasets.tar import write_choice
from clipzoo.evaluation.encoder import Transform
from clipzoo.evaluation.task import Evaluation, compute
from clipzoo.runs.record import MetricKey
from tests.evaluation.test_suite import suite_of
from tests.support.evaluation_sets import COLOURS, IMAGE_SIZE, batch_encoder, classes, model_of, picture, png
from tests.support.ranks import run_ranks

HEADS = ["clip", "wpse", "kme", "filip"]
DIAGONAL = np.eye(2, dtype=bool)
NAMES = list(COLOURS)


def examples_of_all_kinds() -> ChoiceDataset:
    """Groups of two images and captions, triplets of captions, pairs of captions, and cues; some images are shared."""
    images = [picture(COLOURS[NAMES[index % 7]], 900 + index) for index in range(16)]
    captions = [f"{NAMES[index % 7]} thing number {index}" for index in range(80)]
    examples = []
    for number in range(21):
        texts = tuple(range(3 * number, 3 * number + 3))
        a, b, c = number % 16, (number + 5) % 16, (number + 9) % 16
        examples += [
            Example((a, b), texts[:2], frozenset({(0, 0), (1, 1)}), "a group"),
            Example((a,), texts, frozenset({(0, 0), (0, 1)}), "triplet"),
            Example((b,), texts[:2], frozenset({(0, 1)})),
            Example((a, b, c), texts[2:], frozenset({(1, 0), (2, 0)}), "cue/images"),
        ]
    return ChoiceDataset("mixed", images, captions, examples)


def measured(model, data: ChoiceDataset, output, draws: int = 1, world: World = World(), batch_size: int = 7):
    encoder = replace(batch_encoder(batch_size), world=world)
    evaluation, task = Evaluation(model, encoder, draws, output), Choice()
    task.check(data)
    (view,) = task.views(evaluation, data)
    columns = {view: compute(evaluation, data, view, task.columns(evaluation, data))}
    return task.measure(evaluation, data, columns)


def test_scores_of_groups_are_those_of_winogrounds_formulas_and_ties_are_wrong():
    random = np.random.default_rng(0)
    for scores in random.integers(0, 3, (300, 2, 2)):
        (c0_i0, c1_i0), (c0_i1, c1_i1) = scores
        text, image = c0_i0 > c1_i0 and c1_i1 > c0_i1, c0_i0 > c0_i1 and c1_i1 > c1_i0
        values = example_scores(scores, scores, DIAGONAL, scores)
        assert values[:3] == [text, image, text and image]
        assert all(map(math.isnan, values[3:]))


def test_scores_of_two_right_captions_are_those_of_sugarcrepe_pp():
    random = np.random.default_rng(1)
    for p1, p2, negative, p1_p2, p1_negative, p2_negative in random.integers(0, 3, (300, 6)):
        scores = np.array([[p1, p2, negative]])
        within = np.array([[9, p1_p2, p1_negative], [p1_p2, 9, p2_negative], [p1_negative, p2_negative, 9]])
        text, image, group, text_only, jaccard = example_scores(scores, scores, np.array([[True, True, False]]), within)
        assert text == (p1 > negative and p2 > negative)
        assert text_only == (p1_p2 > p1_negative and p1_p2 > p2_negative)
        assert all(map(math.isnan, (image, group, jaccard)))


def test_the_score_of_a_cue_is_datacomps_jaccard_index():
    random = np.random.default_rng(2)
    for count in random.integers(4, 12, 100):
        scores = random.permutation(count).astype(float)
        right = random.permutation(np.arange(count) < random.integers(1, count))
        predicted = np.isin(np.arange(count), np.argsort(scores)[-right.sum() :])
        *_, jaccard = example_scores(scores[:, None], scores[:, None], right[:, None])
        assert jaccard == pytest.approx(jaccard_score(right, predicted))
    tied = example_scores(np.zeros((3, 1)), np.zeros((3, 1)), np.array([[True], [False], [False]]))
    assert tied[1] == 0 and tied[4] == 1


def test_without_ties_scores_are_the_counts_of_clip_benchmark_and_mteb():
    """Both compare argmax with the diagonal; clip-benchmark cuts it to the smaller number, mteb does not."""
    random = torch.Generator().manual_seed(0)
    for images, captions in ((2, 2), (1, 2), (1, 5)):
        scores = torch.rand(200, images, captions, generator=random)
        truth = torch.arange(images)
        texts = [(part.argmax(dim=1)[: len(truth)] == truth).all().item() for part in scores]
        pictures = [(part.argmax(dim=0)[: len(truth)] == truth).all().item() for part in scores]
        right = np.eye(images, captions, dtype=bool)
        values = [example_scores(part.numpy(), part.numpy(), right) for part in scores]
        assert [value[0] for value in values] == texts
        if images > 1:
            assert [value[1] for value in values] == pictures
            assert [value[2] for value in values] == [a and b for a, b in zip(texts, pictures, strict=True)]
    mteb = pytest.importorskip("mteb.abstasks.image.image_text_pair_classification").AbsTaskImageTextPairClassification
    pairs = list(torch.rand(200, 2, 2, generator=random))
    values = np.mean([example_scores(part.numpy(), part.numpy(), DIAGONAL)[:3] for part in pairs], axis=0)
    expected = mteb._compute_metrics(None, pairs, 2, 2)
    assert values.tolist() == pytest.approx([expected[name] for name in ("text_acc", "image_acc", "accuracy")])


@torch.no_grad()
@pytest.mark.medium
@pytest.mark.parametrize("head", HEADS)
def test_metrics_of_any_head_equal_a_loop_over_single_images_and_captions(head, tmp_path):
    model, data = model_of(head), examples_of_all_kinds()
    transform, tokenizer = Transform(IMAGE_SIZE, IMAGE_SIZE, "bicubic"), batch_encoder().tokenizer
    images = [model.encode_image(transform(image)[None]) for image in data.images]
    texts = [model.encode_text(tokenizer([caption])) for caption in data.captions]
    rows: dict[str, list[list[float]]] = {"": [], "a_group": [], "triplet": [], "cue_images": []}
    for example in data.examples:
        both = np.zeros((2, len(example.images), len(example.captions)))
        within = np.zeros((len(example.captions),) * 2)
        for column, caption in enumerate(example.captions):
            for row, image in enumerate(example.images):
                both[:, row, column] = [part.item() for part in model.head.both_scores(images[image], texts[caption])]
            if model.head.compares_within:
                for other, second in enumerate(example.captions):
                    within[column, other] = model.head.score(texts[caption], texts[second]).item()
        right = np.zeros(both.shape[1:], bool)
        for pair in example.pairs:
            right[pair] = True
        values = example_scores(*both, right, within if model.head.compares_within else None)
        rows[""].append(values)
        if example.category:
            rows[example.category.replace(" ", "_").replace("/", "_")].append(values)
    metrics = measured(model, data, tmp_path)
    assert metrics.keys() == rows.keys()
    for category, values in rows.items():
        for name, column in zip(SCORES, np.array(values).T, strict=True):
            counted = column[~np.isnan(column)]
            assert (name in metrics[category]) == bool(len(counted))
            if len(counted):
                assert metrics[category][name] == pytest.approx(100 * counted.mean())
    assert ("text_only" in metrics["triplet"]) == model.head.compares_within
    with np.load(tmp_path / "choice/mixed.npz") as stored:
        assert np.nanmean(stored["text"]) * 100 == pytest.approx(metrics[""]["text"])


def test_draws_of_random_features_give_mean_and_deviation(tmp_path):
    model, data = model_of("wpse"), examples_of_all_kinds()
    together = measured(model, data, tmp_path, draws=3)[""]
    single = []
    for draw in range(3):
        model.head.resample(draw)
        single.append(measured(model, data, tmp_path)[""]["text"])
    assert together["text"] == pytest.approx(np.mean(single)) and together["text_std"] == pytest.approx(
        np.std(single, ddof=1)
    )


def on_a_rank(folder):
    return measured(model_of("kme"), examples_of_all_kinds(), folder, world=World.from_process_group(), batch_size=5)


@pytest.mark.medium
def test_two_ranks_return_the_metrics_of_one(tmp_path):
    alone = measured(model_of("kme"), examples_of_all_kinds(), tmp_path / "one", batch_size=5)
    assert run_ranks(2, on_a_rank, tmp_path / "two") == [alone] * 2


@torch.no_grad()
def test_equal_embeddings_are_never_right_and_nan_is_refused(tmp_path):
    model, data = model_of("clip"), examples_of_all_kinds()
    model.head.text_projection.zero_()
    assert measured(model, data, tmp_path)[""]["text"] == 0
    model.head.text_projection.fill_(torch.nan)
    with pytest.raises(ConfigError, match="similarities are NaN"):
        measured(model, data, tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        Example((16,), (0, 1), frozenset({(0, 0)})),
        Example((0,), (0, 80), frozenset({(0, 0)})),
        Example((0,), (0, 1), frozenset({(1, 0)})),
        Example((0,), (0, 1), frozenset()),
        Example((0,), (0, 1), frozenset({(0, 0), (0, 1)})),
    ],
)
def test_examples_without_a_choice_or_with_unknown_images_are_refused(wrong):
    data = examples_of_all_kinds()
    with pytest.raises(ConfigError, match="mixed: example 84 must have some of 16 images and 80 captions"):
        check_examples(replace(data, examples=[*data.examples, wrong]))


@pytest.mark.medium
def test_the_suite_measures_a_dataset_on_disk_as_in_memory_and_then_reads_its_file(tmp_path):
    data, model = examples_of_all_kinds(), model_of("clip")
    files = [png(image) for image in data.images]
    write_choice(tmp_path / "data/mixed", "test", data.captions, data.examples, files.__getitem__)
    suite = suite_of(tmp_path / "data", zero_shot=[], linear_probe=[], retrieval=[], choice=["mixed"])
    metrics = suite.run(model, tmp_path / "run", World())
    expected = measured(model, data, tmp_path)
    assert metrics == {
        "/".join(filter(None, ("choice", "mixed", category, name))): value
        for category, values in expected.items()
        for name, value in values.items()
    }
    assert MetricKey.parse("choice/mixed/cue_images/jaccard").protocol == "cue_images"
    (tmp_path / "run/choice/mixed.npz").unlink()
    assert suite.run(model, tmp_path / "run", World()) == metrics and not (tmp_path / "run/choice/mixed.npz").exists()
    with pytest.raises(ConfigError, match="colours has no examples of images and captions"):
        Choice().check(classes())
