"""Answers of the explorer: as the models give them."""

from __future__ import annotations

import os

import pytest
import torch

from clipzoo.errors import ConfigError
from clipzoo.explore.app import Explorer, collection_of_images, collections_of, explored, grid
from tests.support.evaluation_sets import picture
from tests.support.explored import collections, explorer_of
from tests.support.exported import loaded, logits

HEADS = ("clip", "wpse", "kme", "cloob")
RED = "search?collection=0&caption=red%20thing"
PARTS = "parts?collection=0&row={}&caption=red%20thing"


@pytest.fixture(scope="module")
def explorer(tmp_path_factory):
    return explorer_of(tmp_path_factory.mktemp("explorer"), *HEADS)


@pytest.mark.medium
@pytest.mark.parametrize("place", range(len(HEADS)))
def test_pictures_are_in_the_order_of_the_models_logits(place, explorer):
    model, images = explorer.models[place].model, explorer.collections[0].gallery.images
    expected = logits(model, [images[row] for row in range(len(images))], ["red thing"])[:, 0]
    matches, best = explorer.answer(RED)[place]["matches"][:5], expected.topk(5)
    assert [match["row"] for match in matches] == best.indices.tolist()
    scores = torch.tensor([match["score"] for match in matches])
    torch.testing.assert_close(scores, best.values, atol=1e-3, rtol=1e-3)


@pytest.mark.medium
def test_the_parts_of_point_sets_sum_to_the_score_that_ranks_the_picture(explorer):
    ranked = {answer["model"]: answer["matches"][0] for answer in explorer.answer(RED)}
    row = ranked["wpse"]["row"]
    (wpse,) = (answer for answer in explorer.answer(PARTS.format(row)) if answer["model"] == "wpse")
    assert wpse["score"] == pytest.approx(ranked["wpse"]["score"], abs=1e-3)
    assert sum(map(sum, wpse["values"])) == pytest.approx(wpse["score"], rel=1e-2, abs=1e-2)
    kme = explorer.answer(PARTS.format(ranked["kme"]["row"]))[1]
    assert kme["is_logarithm"] and kme["score"] == pytest.approx(ranked["kme"]["score"], abs=1e-3)
    assert kme["words"][:4] == ["<start_of_text>", "red", "thing", "<end_of_text>"]
    assert len(kme["values"][0]) == len(kme["words"]) == len(kme["text_weights"])


@pytest.mark.medium
def test_only_cloob_retrieves_from_a_memory(explorer):
    memories = {answer["model"]: answer["memory"] for answer in explorer.answer(RED)}
    assert [name for name, memory in memories.items() if memory] == ["cloob"]
    weights = [part["weight"] for part in memories["cloob"]["retrieved"]]
    assert weights == sorted(weights, reverse=True) and 1 <= memories["cloob"]["patterns"] <= 13


@pytest.mark.medium
def test_a_picture_has_its_captions_and_class_and_is_not_its_own_neighbour(explorer):
    thing, colour = (explorer.answer(f"picture?collection={number}&row=4") for number in (0, 1))
    assert len(thing["captions"]) == 3 and all("thing number 4 " in caption for caption in thing["captions"])
    assert thing["class"] is None and colour["class"] == "cyan"
    for neighbours in (*thing["neighbours"], *colour["neighbours"]):
        assert len(neighbours["matches"]) == 8 and 4 not in {match["row"] for match in neighbours["matches"]}


@pytest.mark.medium
def test_a_map_has_a_point_and_a_class_for_each_picture(explorer):
    answer = explorer.answer("maps?collection=1")
    assert len(answer["rows"]) == len(answer["labels"]) == len(explorer.collections[1])
    for model in answer["models"]:
        points = torch.tensor(model["points"])
        assert points.shape == (len(answer["rows"]), 2) and points.abs().max() == pytest.approx(1, abs=1e-3)
        # Principal components: centred, uncorrelated, the first one wider.
        assert points.mean(dim=0).abs().max() < 2e-3
        assert abs(float(points[:, 0] @ points[:, 1])) < 0.01 * len(points)
        assert model["variance"][0] >= model["variance"][1] > 0
    vectors = explorer.models[0].index(1).images.double()
    values = torch.linalg.svdvals(vectors - vectors.mean(dim=0)).square()
    assert answer["models"][0]["variance"] == pytest.approx((values[:2] / values.sum()).tolist(), abs=2e-3)


@pytest.mark.medium
@pytest.mark.parametrize("limit", [1, 2])
def test_a_map_of_few_pictures_has_two_coordinates(tmp_path, limit):
    parts = collections(tmp_path / "sets", limit)
    explorer = Explorer([explored("clip", "clip", loaded("clip"), parts, tmp_path / "clip")], parts)
    assert torch.tensor(explorer.answer("maps?collection=0")["models"][0]["points"]).shape == (limit, 2)


@pytest.mark.medium
def test_a_limit_takes_pictures_from_the_whole_dataset_with_their_own_captions(tmp_path):
    things, colours = collections(tmp_path, limit=5)
    assert things.gallery.names == ["0", "2", "5", "7", "10"] and things.total == 13
    assert all(f"number {name} " in things.captions[row][0] for row, name in enumerate(things.gallery.names))
    assert len(colours) == 5 and colours.labels == [int(name) % 7 for name in colours.gallery.names]


def test_a_run_without_evaluation_data_is_told_what_to_give():
    with pytest.raises(ConfigError, match="no evaluation data .* give --images FOLDER"):
        collections_of({"eval": {"root": "x", "retrieval": []}}, (), 10)
    with pytest.raises(ConfigError, match="--dataset sea is not an evaluation dataset .* has: scenes"):
        collections_of({"eval": {"root": "x", "retrieval": ["scenes"]}}, ["sea"], 10)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(16, (0, 4)), (17, (1, 4)), (50, (1, 7)), (201, (5, 14)), (4, (0, 2)), (5, (1, 2)), (3, (0, 0))],
)
def test_patches_are_a_square_after_the_tokens_of_the_whole_picture(tokens, expected):
    assert grid(tokens) == expected


def test_pictures_that_change_under_their_names_are_embedded_again(tmp_path):
    picture((200, 10, 10), 1).save(tmp_path / "a.png")
    before = collection_of_images(str(tmp_path), 5).gallery
    os.utime(tmp_path / "a.png", ns=(1, (tmp_path / "a.png").stat().st_mtime_ns + 1))
    after = collection_of_images(str(tmp_path), 5).gallery
    assert before.names == after.names == ["a.png"] and before.source != after.source
