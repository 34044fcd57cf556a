"""Results on all datasets beside the published numbers of a row."""

from __future__ import annotations

from clipzoo.report.render import markdown
from clipzoo.report.sections import published_tables
from clipzoo.runs.record import parsed

METRICS = {
    "zero_shot/imagenet/top1": 20.0, "zero_shot/imagenet/top1_std": 0.25, "zero_shot/imagenet/mean_per_class": 19.0,
    "zero_shot/pets/mean_per_class": 10.0, "zero_shot/pets/top1": 11.0, "zero_shot/shapes/top1": 3.0,
    "retrieval/coco/image_to_text/recall_at_1": 5.0, "retrieval/coco_paired/image_to_text/recall_at_1": 4.0,
}  # fmt: skip


def tables(metrics: dict[str, float], missing: dict[str, str], row: str | None) -> dict[str, list[str]]:
    """Lines of each table, by its title."""
    return {table.title: markdown(table).splitlines() for table in published_tables(parsed(metrics), missing, row)}


def test_each_dataset_has_the_papers_number_in_the_papers_metric():
    lines = tables(METRICS, {}, "wpse/CC3M/CLIP")["Zero-shot"]
    assert "| ImageNet | 20.00 ± 0.25 | 19.94 | +0.06 | wpse/1 |" in lines
    # Mean per class, as the paper has it.
    assert "| Pets | 10.00 | 14.62 | -4.62 | wpse/1 |" in lines
    assert "| CIFAR-10 |  | 59.25 |  | wpse/1 |" in lines
    assert "| shapes | 3.00 |  |  |  |" in lines
    # Not a mean over fewer sets.
    assert "| average of 13 |  | 25.03 |  | wpse/1 |" in lines


def test_paired_recall_is_not_confused_with_standard_recall():
    lines = tables(METRICS, {}, "kme/CC3M/KME-CLIP")["Image to text"]
    assert "| MSCOCO @1 | 4.00 | 14.14 | -10.14 | kme/1 |" in lines
    assert "| MSCOCO @1, standard | 5.00 |  |  |  |" in lines


def test_a_missing_dataset_is_named_with_and_without_a_published_number():
    shown = tables(METRICS, {"dtd": "get it", "gtsrb": "get it"}, "wpse/CC3M/CLIP")
    lines = shown["Zero-shot"]
    assert "| DTD | missing | 13.56 |  | wpse/1 |" in lines
    assert "| GTSRB | missing |  |  |  |" in lines


def test_published_numbers_need_a_row_and_tables_need_a_papers_dataset():
    lines = tables(METRICS, {}, None)["Zero-shot"]
    assert "paper" not in lines[0] and "| ImageNet | 20.00 ± 0.25 |" in lines
    assert not tables({"zero_shot/shapes/top1": 3.0, "step": 5}, {}, None)
    assert not tables({}, {}, "wpse/CC3M/CLIP")


def test_every_table_has_rows_as_wide_as_its_head():
    for row in ("kme/CC3M/KME-CLIP", "cloob/CC3M/CLOOB RN50 (31 epochs)", "nuclr/CC3M/NUCLR", None):
        for lines in tables(METRICS, {"flickr30k": "x"}, row).values():
            assert len(lines) > 2 and len({line.count("|") for line in lines}) == 1
