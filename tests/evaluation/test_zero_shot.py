"""Zero-shot classification against a loop in plain Python and against open_clip's own evaluator."""

from __future__ import annotations

from dataclasses import replace

import open_clip
import pytest
import torch

import clipzoo
from clipzoo.evaluation.encoder import Transform
from clipzoo.evaluation.zero_shot import build_classifiers, zero_shot
from clipzoo.loading import LoadedModel
from clipzoo.types import map_embedding
from tests.support.evaluation_sets import IMAGE_SIZE, batch_encoder, classes, config_of, model_of

HEADS = ["clip", "wpse", "kme", "cloob"]


@torch.no_grad()
def plain_predictions(model, data, resize) -> list[int]:
    """One image and one class at a time, without batches and trimming."""
    encoder = batch_encoder()
    transform = Transform(IMAGE_SIZE, resize, "bicubic")
    rows = []
    for name in data.class_names:
        prompts = [template.replace("{c}", name) for template in data.templates]
        rows.append(model.head.ensemble(model.encode_text(encoder.tokenizer(prompts))))
    predictions = []
    for index in range(len(data.splits["test"])):
        image = model.encode_image(transform(data.splits["test"][index][0])[None])
        scores = [model.similarity(image, row).item() for row in rows]
        predictions.append(scores.index(max(scores)))
    return predictions


@pytest.mark.medium
@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_zero_shot_of_any_head_equals_a_plain_loop_over_images_and_classes(head):
    model, data = model_of(head), classes()
    result = zero_shot(model, data, batch_encoder(batch_size=7), 36, draws=1)
    expected = plain_predictions(model, data, 36)
    assert result.predictions.tolist() == expected
    right = [guess == label for guess, label in zip(expected, data.splits["test"].labels, strict=True)]
    assert result.metrics["top1"] == pytest.approx(100 * sum(right) / len(right))


@pytest.mark.medium
@torch.no_grad()
def test_classifier_and_accuracy_equal_open_clips(tmp_path):
    config = config_of("clip")
    model = LoadedModel(model_of("clip").float(), config)
    clipzoo.export(model, tmp_path)
    peer = open_clip.create_model(f"local-dir:{tmp_path}").eval().double()
    model.double()
    data, tokenizer = classes(), batch_encoder().tokenizer
    templates = [lambda name, line=line: line.replace("{c}", name) for line in data.templates]
    weights = open_clip.build_zero_shot_classifier(peer, tokenizer, data.class_names, templates, use_tqdm=False)
    ours = build_classifiers(model, data.class_names, data.templates, batch_encoder(), 1)[0]
    torch.testing.assert_close(ours.mT, weights, rtol=1e-10, atol=1e-10)

    transform = Transform(IMAGE_SIZE, IMAGE_SIZE, "bicubic")
    items = [data.splits["test"][index] for index in range(len(data.splits["test"]))]
    # Normalised as the encoder does it, in double precision.
    mean, std = (torch.tensor(config["encoder"][key], dtype=torch.float64).view(3, 1, 1) for key in ("mean", "std"))
    images = torch.stack([(transform(image).double() / 255 - mean) / std for image, _ in items])
    labels = torch.tensor([label for _, label in items])
    logits = 100 * peer.encode_image(images, normalize=True) @ weights
    # open_clip's accuracy(); its own last line fails with numpy 2.4.
    correct = logits.topk(5).indices.mT.eq(labels)
    top1, top5 = correct[:1].sum().item(), correct[:5].sum().item()
    result = zero_shot(model, data, batch_encoder(), IMAGE_SIZE, draws=1)
    assert result.metrics["top1"] == pytest.approx(100 * top1 / len(labels))
    assert result.metrics["top5"] == pytest.approx(100 * top5 / len(labels))


@torch.no_grad()
def test_a_model_that_scores_all_classes_equally_predicts_the_first():
    model, data = model_of("clip"), classes()
    model.head.text_projection.zero_()
    result = zero_shot(model, data, batch_encoder(), 32, draws=1)
    assert set(result.predictions.tolist()) == {0}
    assert result.metrics["top1"] == pytest.approx(100 * data.splits["test"].labels.count(0) / 33)
    assert result.metrics["mean_per_class"] == pytest.approx(100 / 7)
    assert result.metrics["top5"] == pytest.approx(100 * sum(label < 5 for label in data.splits["test"].labels) / 33)


@pytest.mark.medium
@torch.no_grad()
def test_several_draws_give_the_mean_and_deviation_of_single_draws_and_a_deterministic_head_has_none():
    model, data = model_of("wpse"), classes()
    together = zero_shot(model, data, batch_encoder(), 32, draws=3).metrics
    single = []
    for draw in range(3):
        # With one draw the evaluator uses the head's current draw.
        model.head.resample(draw)
        single.append(zero_shot(model, data, batch_encoder(), 32, draws=1).metrics["top5"])
    assert len(set(single)) > 1
    assert together["top5"] == pytest.approx(torch.tensor(single).mean().item())
    assert together["top5_std"] == pytest.approx(torch.tensor(single).std().item())
    deterministic = zero_shot(model_of("clip"), data, batch_encoder(), 32, draws=5).metrics
    assert not [key for key in deterministic if key.endswith("_std")]


def test_the_size_of_score_blocks_does_not_change_the_metrics(monkeypatch):
    model, data = model_of("kme"), classes()
    whole = zero_shot(model, data, batch_encoder(), 32, draws=1)
    monkeypatch.setattr("clipzoo.evaluation.scoring.BLOCK_POINT_PAIRS", 1)
    assert zero_shot(model, data, batch_encoder(), 32, draws=1).metrics == whole.metrics


@torch.no_grad()
def test_classes_without_samples_a_single_class_labels_without_a_class_and_nan_scores_are_named():
    without, single = classes(), replace(classes(), class_names=["red"])
    without.splits["test"].labels = [label for label in without.splits["test"].labels if label != 4]
    single.splits["test"].labels = [0, 0, 0]
    broken = model_of("clip")
    broken.head.image_projection.fill_(float("nan"))
    for model, data, message in (
        (model_of("clip"), without, r"colours, test: 1 of 7 classes have no sample \('cyan'\)"),
        (model_of("clip"), single, "nothing can be classified"),
        (model_of("clip"), replace(classes(), class_names=classes().class_names[:5]),
         "colours, test: label 5, but its classes are 0 to 4"),
        (broken, classes(), "similarities are NaN"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            zero_shot(model, data, batch_encoder(), 32, draws=1)


def test_a_classifier_row_is_the_ensemble_of_its_own_prompts():
    model, data, encoder = model_of("kme"), classes(), batch_encoder(batch_size=5)
    with torch.no_grad():
        rows = build_classifiers(model, data.class_names, data.templates, encoder, 1)[0]
        prompts = [template.replace("{c}", "blue") for template in data.templates]
        one = model.head.ensemble(model.encode_text(encoder.tokenizer(prompts)))
        image = model.encode_image(torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8))
        row = map_embedding(lambda tensor: tensor[2:3], rows)
        torch.testing.assert_close(model.similarity(image, row), model.similarity(image, one))
