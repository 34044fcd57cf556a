"""Indices of images: complete after interruptions, and as exact as scoring all images."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import clipzoo
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.explore import index as indices
from clipzoo.explore.index import Candidates, read_gallery
from tests.support.exported import captions, loaded, logits, pictures
from tests.support.heads import build_head, image_features, text_features
from tests.support.ranks import run_ranks

COUNT = 40

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def gallery(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gallery")
    for number, picture in enumerate(pictures(COUNT)):
        (folder / f"{number % 3}").mkdir(exist_ok=True)
        picture.save(folder / f"{number % 3}" / f"{number:03d}.png")
    (folder / "notes.txt").write_text("no image")
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for head in ("clip", "kme", "distance"):
        clipzoo.export(loaded(head), folder / head, "hub")
    return folder


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indices, "BLOCK", 16)
        yield


@pytest.fixture(scope="module")
def whole(gallery, published, tmp_path_factory, small_blocks) -> clipzoo.SearchIndex:
    """The gallery's index for CLIP; tests that change its files copy its folder."""
    source = str(published / "clip")
    return clipzoo.build_index(clipzoo.load(source), source, str(gallery), tmp_path_factory.mktemp("index") / "whole")


@pytest.mark.parametrize("faiss", [True, False])
@pytest.mark.parametrize("head", ["clip", pytest.param("distance", marks=pytest.mark.slow)])
def test_inner_products_find_the_images_with_the_highest_logits(head, faiss, gallery, published, tmp_path, monkeypatch):
    if faiss:
        pytest.importorskip("faiss")
    else:
        monkeypatch.setattr("clipzoo.explore.index.find_spec", lambda name: None)
    model = clipzoo.load(published / head)
    index = clipzoo.build_index(model, str(published / head), str(gallery), tmp_path / "index")
    images = [Image.open(gallery / name) for name in index.names]
    expected = logits(model, images, captions(5))
    for column, matches in enumerate(index.search(captions(5), 7)):
        best = expected[:, column].topk(7)
        assert [match.name for match in matches] == [index.names[row] for row in best.indices]
        torch.testing.assert_close(torch.tensor([match.score for match in matches]), best.values, rtol=1e-5, atol=1e-5)
    assert index.recall(captions(5), 7) == 1.0


@pytest.mark.slow
def test_the_approximation_of_kme_finds_candidates_and_their_scores_are_exact(gallery, published, tmp_path):
    index = clipzoo.build_index(clipzoo.load(published / "kme"), str(published / "kme"), str(gallery), tmp_path / "i")
    (found,), (best,) = index.search("a red circle", 3, candidates=15), index.search("a red circle", COUNT)
    scores = {match.name: match.score for match in best}
    assert len(best) == COUNT
    assert all(match.score == pytest.approx(scores[match.name], abs=1e-5) for match in found)
    assert index.recall(captions(8), 3, candidates=15) > 0.9
    assert index.recall(captions(8), 3) == 1.0


def test_products_of_kme_are_its_scores_where_all_points_are_landmarks():
    head = build_head("kme").eval()
    with torch.no_grad():
        image, text = head.embed_image(image_features(6)), head.embed_text(text_features(4))
        left, right = head.search_factors(image, text)
        torch.testing.assert_close((left @ right.mT).log(), head.score(image, text), rtol=1e-4, atol=1e-4)


def test_recall_of_kme_rises_with_the_landmarks(monkeypatch):
    """Of 40 images, whose points are few more than the most landmarks."""
    head = build_head("kme").eval()
    with torch.no_grad():
        images, texts = head.embed_image(image_features(40)), head.embed_text(text_features(12))
        best = head.score(images, texts).topk(5, dim=0).indices
        recalls = []
        for landmarks in (4, 32, 200):
            monkeypatch.setattr("clipzoo.heads.kme.LANDMARKS", landmarks)
            candidates = Candidates(head, images)
            found = [candidates.best(texts[place : place + 1], 10).tolist() for place in range(12)]
            recalls.append(sum(row in found[place] for place in range(12) for row in best[:, place].tolist()) / 60)
    assert recalls[0] < recalls[2] and recalls[1] <= recalls[2] == 1.0


@pytest.mark.parametrize("name", ["clip", "cloob", "cosine", "inner_product", "distance", "wpse", "prolip"])
def test_the_factors_of_every_other_head_give_its_score(name):
    head = build_head(name).eval()
    with torch.no_grad():
        image, text = head.embed_image(image_features(6)), head.embed_text(text_features(4))
        left, right = head.search_factors(image, text)
        torch.testing.assert_close(left @ right.mT, head.score(image, text))
        assert head.is_inner_product
        best = Candidates(head.float(), image.float()).best(text[:1].float(), 6)
    assert best.tolist() == head.score(image, text[:1].double())[:, 0].sort(descending=True).indices.tolist()


@pytest.mark.parametrize("name", ["meru", "hycoclip"])
def test_a_distance_is_searched_by_the_inner_product_that_orders_it(name):
    head = build_head(name).eval()
    assert head.is_inner_product
    with torch.no_grad():
        image, text = head.embed_image(image_features(9)), head.embed_text(text_features(4))
        left, right = head.search_factors(image, text)
        assert torch.equal((left @ right.mT).argsort(dim=0), head.score(image, text).argsort(dim=0))
        best = Candidates(head.float(), image.float()).best(text[:1].float(), 9)
    assert best.tolist() == head.score(image, text[:1].double())[:, 0].sort(descending=True).indices.tolist()


@pytest.mark.slow
def test_an_interrupted_index_is_completed_and_equals_an_undisturbed_one(whole, gallery, published, tmp_path):
    folder = shutil.copytree(whole.folder, tmp_path / "part")
    (folder / "blocks" / "00001.safetensors").unlink()
    with pytest.raises(ConfigError, match="lacks 1 blocks: run the same clipzoo index again"):
        clipzoo.SearchIndex(folder)
    lines = []
    part = clipzoo.build_index(whole.model, str(published / "clip"), str(gallery), folder, report=lines.append)
    assert lines == ["1 of 1 blocks of 16 images"]
    assert torch.equal(part.images, whole.images)


def _build_on_rank(source, images, folder):
    lines: list[str] = []
    indices.BLOCK = 16  # of this process
    world = World.from_process_group()
    index = clipzoo.build_index(clipzoo.load(source), source, images, folder, world, report=lines.append)
    return None if index is None else index.images, lines


@pytest.mark.slow
def test_two_ranks_share_the_blocks_that_an_interrupted_index_lacks(whole, gallery, published, tmp_path):
    folder = shutil.copytree(whole.folder, tmp_path / "index")
    for number in (0, 1):
        (folder / "blocks" / f"{number:05d}.safetensors").unlink()
    answers = run_ranks(2, _build_on_rank, str(published / "clip"), str(gallery), folder)
    (first, lines), (second, other_lines) = answers
    assert second is None and torch.equal(first, whole.images)
    assert lines == other_lines == ["1 of 1 blocks of 16 images"]


def test_an_index_of_other_images_or_weights_is_refused(whole, gallery, published, tmp_path):
    folder, source = shutil.copytree(whole.folder, tmp_path / "index"), str(published / "clip")
    with pytest.raises(ConfigError, match="has an index of other images"):
        clipzoo.build_index(whole.model, source, str(gallery / "0"), folder)
    with pytest.raises(ConfigError, match="has an index of another model"):
        clipzoo.build_index(clipzoo.load(published / "distance"), source, str(gallery), folder)
    rewrite(folder, model=str(published / "distance"))
    with pytest.raises(ConfigError, match="was built with other weights"):
        clipzoo.SearchIndex(folder)


def test_a_folder_without_images_and_a_missing_shard_are_named(tmp_path):
    with pytest.raises(ConfigError, match="has no images"):
        read_gallery(str(tmp_path))
    with pytest.raises(ConfigError, match="00000.tar does not exist"):
        read_gallery(str(tmp_path / "{00000..00003}.tar"))


def test_images_of_shards_have_the_names_of_their_samples(tiny_shards):
    gallery = read_gallery(tiny_shards)
    assert gallery.names[:2] == ["00000.tar/000000", "00000.tar/000001"] and len(gallery.names) == 100
    assert gallery.images[0].size == (40, 36)


def rewrite(folder, **facts):
    path = folder / indices.FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


def damage(folder, change):
    for path in (folder / "blocks").iterdir():
        save_file(change(load_file(path)["embedding"]), path)


@pytest.mark.parametrize(
    "change",
    [
        *(lambda folder, facts=facts: rewrite(folder, **facts) for facts in (
            {"count": 2**62}, {"count": -1}, {"block": 0}, {"names": "x"}, {"key": "x"}, {"model": 3},
        )),
        *(lambda folder, changed=changed: damage(folder, changed) for changed in (
            lambda block: {},
            lambda block: {"points": block},
            lambda block: {"embedding": block[:3].clone()},
            lambda block: {"embedding": block[:, :2].clone()},
            lambda block: {"embedding": block.half()},
            lambda block: {"embedding": block.long()},
            lambda block: {"embedding": block.where(block != block.max(), torch.nan)},
            lambda block: {"embedding": block.where(block != block.max(), -torch.inf)},
        )),
    ],
)  # fmt: skip
def test_an_index_with_other_facts_or_a_damaged_block_is_refused(change, whole, tmp_path):
    folder = shutil.copytree(whole.folder, tmp_path / "index")
    change(folder)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        clipzoo.SearchIndex(folder, whole.model)
