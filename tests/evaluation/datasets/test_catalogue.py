"""Every dataset of the catalogue, read from a tiny copy in its layout; tables of images; copies over http."""

from __future__ import annotations

import hashlib
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pandas as pd
import pytest

from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets import prompts
from clipzoo.evaluation.datasets.benchmarks import MissingDatasetError, local_copy, open_benchmark, read_source
from clipzoo.evaluation.datasets.dataset import ClassificationDataset, RetrievalDataset, catalogue
from tests.support.catalogue_layouts import LAYOUTS, tars
from tests.support.distributed_datasets import RETRIEVAL, WRITERS, encoded, place_of

FURTHER = [name for name, facts in catalogue().items() if facts.get("family", name) in LAYOUTS]
# The other languages of Babel-ImageNet differ only in lists.
FURTHER = [name for name in FURTHER if not name.startswith("babel_") or name[-2:] in ("de", "no", "zh")]
IN_TARS = [name for name, facts in catalogue().items() if "wds" in facts or facts["reader"] == "tars"]
LISTED = {"babel_imagenet", "imagenet_ar", "imagenet_cn", "imagenet_it", "imagenet_jp"}
"""Datasets whose class names are in clip-benchmark."""


@pytest.fixture
def small(monkeypatch):
    """Let the catalogue expect the sizes of tiny copies, and no particular class names."""
    changed = {
        name: {**facts, "classes": None, "samples": {}, "images": None, "templates": {"source": "none"}}
        for name, facts in catalogue().items()
    }
    for facts in changed.values():
        facts.pop("templates")
        facts.pop("names", None)
    monkeypatch.setattr("clipzoo.evaluation.datasets.benchmarks.catalogue", lambda: changed)


def test_every_dataset_of_the_catalogue_is_read_by_a_test():
    families = {facts.get("family", name): facts for name, facts in catalogue().items()}
    choices = {name for name, facts in families.items() if "metric" not in facts and "captions" not in facts}
    only_tars = {name for name, facts in families.items() if facts.get("reader") == "tars"}
    assert only_tars <= set(IN_TARS)
    assert families.keys() - choices == WRITERS.keys() | RETRIEVAL.keys() | LAYOUTS.keys() | only_tars


@pytest.mark.parametrize("name", FURTHER)
def test_a_dataset_is_read_in_the_layout_of_its_authors(name, tmp_path, monkeypatch, small):
    facts = catalogue()[name]
    family = facts.get("family", name)
    if family == "babel_imagenet":
        pytest.importorskip("clip_benchmark")
    for module in ("torchvision.datasets.svhn.check_integrity", "torchvision.datasets.mnist.check_integrity"):
        monkeypatch.setattr(module, lambda *_: True)
    root = tmp_path / facts.get("folder", name)
    expected = LAYOUTS[family](root, name.removeprefix(f"{family}_")) if "family" in facts else LAYOUTS[family](root)
    source = read_source(name, root)
    images = source.split_images("test")
    assert [place_of(images[index]) for index in range(len(images))] == [place for place, _, _ in expected]
    if isinstance(source, RetrievalDataset):
        captions = [[] for _ in expected]
        for text, image in zip(source.captions, source.caption_image, strict=True):
            captions[image].append(text)
        assert captions == [texts for _, texts, _ in expected]
    else:
        assert isinstance(source, ClassificationDataset)
        test = source.splits["test"]
        for index, (_, answer, group) in enumerate(expected):
            label = test.labels[index]
            if test.all_labels is None:
                assert source.class_names[label] == answer
            else:
                every = [source.class_names[of] if isinstance(of, str) else of for of in test.all_labels[index]]
                assert test.all_labels[index][:1] == ([label] if every else [])
                named = [source.class_names[of] for of in test.all_labels[index]] if name != "imagenet_real" else every
                assert named == answer
            assert (source.groups[test.groups[index]] if test.groups else "") == group
    # The whole way, by name below eval.root.
    opened = open_benchmark(name, tmp_path, "set")
    assert len(opened.split_images("test")) == len(expected)
    if isinstance(opened, ClassificationDataset):
        assert opened.metric == facts["metric"] and all("{c}" in template for template in opened.templates)


@pytest.mark.parametrize("name", IN_TARS)
@pytest.mark.parametrize("form", ["{}", "wds_{}", "wds_{}_test"])
def test_a_dataset_is_read_from_the_tars_of_clip_benchmark_and_datacomp(name, form, tmp_path, small):
    facts = catalogue()[name]
    kind = "multilabel" if facts.get("metric") == "mean_average_precision" else "classification"
    kind = "retrieval" if "captions" in facts else kind
    tars(tmp_path / form.format(facts.get("wds", [name])[0]), kind, "group_column" in facts)
    dataset = open_benchmark(name, tmp_path, "set")
    assert dataset.name == name
    assert [place_of(dataset.split_images("test")[index]) for index in range(3)] == [0, 1, 2]
    if isinstance(dataset, RetrievalDataset):
        assert dataset.captions == [f"{turn} {place}" for place in range(3) for turn in ("one", "two")]
        return
    assert isinstance(dataset, ClassificationDataset)
    test = dataset.splits["test"]
    assert (dataset.class_names, dataset.templates, dataset.metric) == (["first", "second"], ["a {c}"], facts["metric"])
    assert test.labels == ([0, 1, 0] if kind == "multilabel" else [1, 0, 1])
    assert test.all_labels == ([[0, 1], [1], [0, 1]] if kind == "multilabel" else None)
    assert (test.groups, dataset.groups) == (([1, 0, 1], ["0", "1"]) if "group_column" in facts else ([], []))


def test_lists_of_other_languages_have_the_digests_of_the_catalogue():
    pytest.importorskip("clip_benchmark")
    for name in sorted(LISTED - {"babel_imagenet"}):
        facts = catalogue()[name]
        own = [str(label) for label in range(1000)]
        names = prompts.class_names(own, facts["names"], name, Path("nowhere"))
        assert prompts.names_digest(names) == facts["names"]["digest"]
        assert prompts.templates(facts["templates"], "slip", name, Path("nowhere"))
    templates = prompts.templates(catalogue()["babel_imagenet_de"]["templates"], "slip", "babel", Path("nowhere"))
    assert len(templates) == 80 and all("{c}" in template for template in templates)
    with pytest.raises(ConfigError, match="not that of version 1.6.2"):
        prompts.package_list({"file": "babel_imagenet.json", "source": "DE", "file_digest": "0"})


# Tables with embedded images.


def tables(folder: Path, form: str, columns: dict[str, list], features: bool) -> Path:
    """Write columns as Parquet with row groups of two rows, or as the package `datasets` saves Arrow files."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    table = pyarrow.table(columns)
    if features:
        info = b'{"info": {"features": {"label": {"names": ["cat", "sea_lion"], "_type": "ClassLabel"}}}}'
        table = table.replace_schema_metadata({b"huggingface": info})
    folder.mkdir(parents=True, exist_ok=True)
    if form == "parquet":
        parquet.write_table(table, folder / "test-00000-of-00001.parquet", row_group_size=2)
    else:
        writer = ipc.new_stream if form == "stream" else ipc.new_file
        with writer(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    return folder


@pytest.mark.parametrize("form", ["parquet", "stream", "file"])
def test_a_table_with_embedded_images_is_a_dataset_of_classes_or_captions(form, tmp_path):
    images = [{"bytes": encoded(place), "path": f"{place}.jpg"} for place in range(5)]
    tables(tmp_path / "named" / "test", form, {"image": images, "label": [1, 0, 1, 1, 0]}, features=True)
    named = open_benchmark("named", tmp_path, "set")
    assert isinstance(named, ClassificationDataset)
    assert (named.class_names, named.templates) == (["cat", "sea lion"], ["a photo of a {c}."])
    test = named.splits["test"]
    assert [place_of(test[index][0]) for index in (4, 0, 3, 1, 2)] == [4, 0, 3, 1, 2]
    assert test.labels == [1, 0, 1, 1, 0] and test.images.encoded(3) == encoded(3)
    words = {"img": [encoded(place) for place in range(3)], "label": ["b", "a", "b"]}
    tables(tmp_path / "words", form, words, features=False)
    assert open_benchmark("words", tmp_path, "set").splits["test"].labels == [1, 0, 1]
    texts = {"image": images[:3], "caption": [["one", "two"], ["three"], ["four "]], "sentids": [[1], [2], [3]]}
    tables(tmp_path / "pairs" / "data", form, texts, features=False)
    pairs = open_benchmark("pairs", tmp_path, "set")
    assert isinstance(pairs, RetrievalDataset)
    assert (pairs.captions, pairs.caption_image) == (["one", "two", "three", "four"], [0, 0, 1, 2])
    assert place_of(pairs.images[2]) == 2


def test_damaged_and_unsuitable_tables_are_named(tmp_path):
    folder = tables(tmp_path / "set", "parquet", {"image": [b"no image"], "label": [0]}, features=False)
    dataset = open_benchmark("set", tmp_path, "set")
    with pytest.raises(ConfigError, match=r"test-00000-of-00001.parquet: row 0 cannot be decoded"):
        dataset.splits["test"][0]
    tables(tmp_path / "other", "parquet", {"x": [1]}, features=False)
    with pytest.raises(ConfigError, match="no column of images and of labels or captions, only x"):
        open_benchmark("other", tmp_path, "set")
    file = folder / "test-00000-of-00001.parquet"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match="is damaged: .*download it again"):
        open_benchmark("set", tmp_path, "set")


# Tars behind an address.


@pytest.fixture
def served(tmp_path):
    """Serve tmp_path/served by http; every tenth request fails with status 503. Return the address and the requests."""
    pytest.importorskip("aiohttp", reason="pip install aiohttp")
    requests: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, directory=str(tmp_path / "served"), **options)

        def do_GET(self) -> None:  # noqa: N802 - the name of http.server
            requests.append(self.path)
            self.send_error(503) if len(requests) % 10 == 0 else super().do_GET()

        def do_HEAD(self) -> None:  # noqa: N802
            requests.append(self.path)
            self.send_error(503) if len(requests) % 10 == 0 else super().do_HEAD()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", requests
    server.shutdown()
    server.server_close()


def content(dataset: ClassificationDataset) -> tuple[object, ...]:
    split = dataset.splits["test"]
    pixels = hashlib.sha256(b"".join(np.asarray(split[index][0]).tobytes() for index in range(len(split))))
    return dataset.class_names, dataset.templates, dataset.metric, split.labels, split.groups, pixels.hexdigest()


@pytest.mark.medium
def test_a_dataset_over_http_equals_the_local_one_although_every_tenth_request_fails(tmp_path, served, small):
    url, requests = served
    for name in ("fmow", "dollar_street", "pcam", "voc2007", "geode"):
        facts = catalogue()[name]
        tars(tmp_path / "served" / f"wds_{facts.get('wds', [name])[0]}_test", "classification", "group_column" in facts)
        local = open_benchmark(name, tmp_path / "served", "set")
        copied = open_benchmark(name, url, "set", ("test",), tmp_path / "cache")
        assert content(copied) == content(local)
    assert len(requests) > 40, "some of them failed"
    # A complete copy is used without a request; {name} is CLIP_benchmark's name.
    count = len(requests)
    whole = f"{url}/wds_{{name}}_test"
    assert content(open_benchmark("geode", whole, "set", ("test",), tmp_path / "cache")) == content(local)
    assert len(requests) - count < 20
    count = len(requests)
    open_benchmark("geode", whole, "set", ("test",), tmp_path / "cache")
    assert len(requests) == count
    with pytest.raises(MissingDatasetError, match="resisc45 is not in"):
        open_benchmark("resisc45", url, "set", ("test",), tmp_path / "cache")


def test_an_interrupted_copy_continues_and_a_copy_of_a_wrong_size_is_an_error(tmp_path, served, small, monkeypatch):
    url, requests = served
    tars(tmp_path / "served" / "mine", "classification", False)
    (tmp_path / "served" / "mine" / "test" / "1.tar").rename(tmp_path / "1.tar")
    with pytest.raises(ConfigError, match="mine/test/1.tar is missing, but test/nshards.txt counts it"):
        local_copy(f"{url}/mine", ["test"], tmp_path / "cache")
    (tmp_path / "1.tar").rename(tmp_path / "served" / "mine" / "test" / "1.tar")
    count = len(requests)
    folder = local_copy(f"{url}/mine", ["test"], tmp_path / "cache")
    assert folder is not None and not any("0.tar" in path for path in requests[count:])
    assert not [path for path in folder.rglob("*") if "part" in path.name or ".tmp" in path.name]
    tar = folder / "test" / "0.tar"
    tar.write_bytes(tar.read_bytes()[:-512])
    with pytest.raises(ConfigError, match=r"0\.tar has \d+ bytes in place of \d+: remove .* to download it again"):
        local_copy(f"{url}/mine", ["test"], tmp_path / "cache")


def test_a_list_that_lacks_a_column_or_a_line_is_named(tmp_path):
    LAYOUTS["geode_all"](tmp_path)
    table = pd.read_csv(tmp_path / "index.csv").drop(columns="region")
    table.to_csv(tmp_path / "index.csv", index=False)
    with pytest.raises(ConfigError, match="a row of the list has no region"):
        read_source("geode_all", tmp_path)
    LAYOUTS["multi30k"](tmp_path, "de")
    (tmp_path / "raw" / "test_2016_flickr.de").write_text("one line\n")
    with pytest.raises(ConfigError, match="have different numbers of lines"):
        read_source("multi30k_de", tmp_path)
