import pytest

from clipzoo.runs.record import MetricKey, parsed, written

KEYS = {
    "zero_shot/cifar10/top1": MetricKey("zero_shot", "cifar10", "", "top1"),
    "linear_probe/pets/before/mean_per_class": MetricKey("linear_probe", "pets", "before", "mean_per_class"),
    "retrieval/coco/image_to_text/recall_at_1": MetricKey("retrieval", "coco", "image_to_text", "recall_at_1"),
    "retrieval/coco_paired/image_to_text/recall_at_5": MetricKey(
        "retrieval", "coco", "paired_image_to_text", "recall_at_5"
    ),
    "validation/loss": MetricKey("validation", "", "", "loss"),
    "training/seconds": MetricKey("training", "", "", "seconds"),
    "loss": MetricKey("", "", "", "loss"),
    "my_task/my_data/a/b/score": MetricKey("my_task", "my_data", "a/b", "score"),
}


@pytest.mark.parametrize("text", KEYS)
def test_a_key_round_trips_through_its_written_form(text):
    assert MetricKey.parse(text) == KEYS[text]
    assert str(KEYS[text]) == text
    assert written(parsed({text: 1.5})) == {text: 1.5}


def test_lower_losses_and_higher_accuracies_are_better():
    for text, better in (("validation/loss", 1.0), ("average/validation/loss", 1.0), ("zero_shot/cifar10/top1", 2.0)):
        key = MetricKey.parse(text)
        assert key.is_better(better, 3.0 - better) and not key.is_better(3.0 - better, better)
        assert not key.is_better(better, better)


def test_only_retrieval_has_a_paired_protocol():
    key = MetricKey.parse("zero_shot/things_paired/top1")
    assert key.dataset == "things_paired" and not key.paired
    assert MetricKey.parse("retrieval/coco_paired/image_to_text/recall_at_1").paired


def test_a_deviation_is_a_key_of_its_own():
    key = MetricKey.parse("retrieval/coco_paired/image_to_text/recall_at_1")
    assert str(key.deviation) == "retrieval/coco_paired/image_to_text/recall_at_1_std"
