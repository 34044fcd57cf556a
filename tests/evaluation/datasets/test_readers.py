"""Benchmark datasets of the catalogue, read from tiny copies in their distributed layout by their own readers."""

from __future__ import annotations

import json
import shutil
import sys
from importlib import resources
from pathlib import Path

import pandas as pd
import pytest
import torchvision.datasets

from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets import prompts
from clipzoo.evaluation.datasets.benchmarks import MissingDatasetError, convert, open_benchmark, read_source
from clipzoo.evaluation.datasets.dataset import (
    ClassificationDataset,
    EvaluationDataset,
    RetrievalDataset,
    catalogue,
    check_size,
)
from clipzoo.runs.record import TWO_LISTS
from tests.support.distributed_datasets import RETRIEVAL, WRITERS, place_of
from tests.support.paths import ROOT

TABLES = ROOT / "tests" / "report" / "papers"
CLASSIFICATION = list(WRITERS)


@pytest.fixture(autouse=True)
def any_content(monkeypatch):
    """Switch off torchvision's comparison of files with the digests of the real ones."""
    for kind in ("CIFAR10", "STL10"):
        monkeypatch.setattr(getattr(torchvision.datasets, kind), "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    monkeypatch.setattr("torchvision.datasets.flowers102.check_integrity", lambda *_: True)


@pytest.fixture
def small(monkeypatch):
    """Put a tiny copy's counts and names into the catalogue, and return the copy as read."""

    def shrink(name: str, folder: Path) -> EvaluationDataset:
        source, facts = read_source(name, folder), dict(catalogue()[name])
        if isinstance(source, RetrievalDataset):
            facts |= {"images": len(source.images)}
        else:
            facts["samples"] = {split: len(samples) for split, samples in source.splits.items()}
            facts["classes"] = len(source.class_names)
            facts["names"] = {"source": "own", "digest": prompts.names_digest(source.class_names)}
            digest = prompts.templates_digest(["a {c}"])
            facts["templates"] = {"source": "combined", "line": "a {{c}}", "parts": [], "digest": digest}
        changed = {**catalogue(), name: facts}
        monkeypatch.setattr("clipzoo.evaluation.datasets.benchmarks.catalogue", lambda: changed)
        return source

    return shrink


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_a_classification_dataset_is_read_as_distributed(name, tmp_path):
    expected = WRITERS[name](tmp_path)
    source = read_source(name, tmp_path)
    assert set(source.splits) == set(expected)
    for split, names in expected.items():
        samples = source.splits[split]
        assert len(samples) == len(names)
        # EuroSAT and Caltech-101 have thousands of equal images.
        chosen = range(len(names)) if len(names) < 50 else [0, len(names) // 2 - 1, len(names) // 2, len(names) - 1]
        for index in chosen:
            image, label = samples[index]
            assert image.mode == "RGB"
            assert source.class_names[label] == names[index]
            assert place_of(image) == label


@pytest.mark.parametrize("name", ["imagenet", "birdsnap"])
def test_zero_shot_needs_only_the_test_images_of_class_folders(name, tmp_path, small):
    expected = WRITERS[name](tmp_path / name)
    whole = small(name, tmp_path / name)
    shutil.rmtree(tmp_path / name / "train")
    dataset = open_benchmark(name, tmp_path, "slip")
    assert list(dataset.splits) == ["test"] and list(dataset.class_names) == list(whole.class_names)
    assert [whole.class_names[label] for label in dataset.splits["test"].labels] == expected["test"]
    shutil.rmtree(tmp_path / name / ("val" if name == "imagenet" else "test"))
    with pytest.raises(MissingDatasetError):
        open_benchmark(name, tmp_path, "slip")


@pytest.mark.parametrize("name", [name for name in CLASSIFICATION if name not in {"eurosat", "caltech101"}])
def test_a_converted_dataset_holds_the_same_samples(name, tmp_path, small):
    WRITERS[name](tmp_path / "raw")
    source = small(name, tmp_path / "raw")
    converted = convert(name, tmp_path / "raw", tmp_path / "converted")
    assert isinstance(converted, ClassificationDataset) and converted.metric == catalogue()[name]["metric"]
    for split, samples in source.splits.items():
        assert len(converted.splits[split]) == len(samples)
        for index in range(len(samples)):
            (image, label), (expected_image, expected_label) = converted.splits[split][index], samples[index]
            assert label == expected_label
            assert image.tobytes() == expected_image.tobytes()
    distributed = open_benchmark(name, _renamed(tmp_path, name), "slip")
    assert distributed.class_names == converted.class_names and distributed.templates == converted.templates


def _renamed(folder: Path, name: str) -> Path:
    """Root folder with the distributed files under the dataset's name."""
    (folder / "direct").mkdir()
    (folder / "raw").rename(folder / "direct" / name)
    return folder / "direct"


def test_a_damaged_shard_of_pairs_is_an_error_instead_of_a_smaller_gallery(tmp_path):
    RETRIEVAL["cc3m_validation"](tmp_path)
    shard = tmp_path / "00001.tar"
    shard.write_bytes(shard.read_bytes()[:2000])
    with pytest.raises(ConfigError, match="00001.tar: truncated"):
        read_source("cc3m_validation", tmp_path)


@pytest.mark.parametrize("name", RETRIEVAL)
def test_a_retrieval_dataset_is_read_as_distributed_and_converted(name, tmp_path, small):
    RETRIEVAL[name](tmp_path / "raw")
    facts = catalogue()[name]
    source = small(name, tmp_path / "raw")
    places = [place_of(source.images[index]) for index in range(len(source.images))]
    if name != "cc3m_validation":
        assert places == ([0, 3] if facts["split"] == "test" else [1])
        assert source.captions == [f"caption {turn} of {place}" for place in places for turn in range(5)]
    else:
        # The sample without an image is left out; a line break inside a caption does not make a second caption.
        assert places == [0, 2, 3] and source.captions == [f"caption of {place}" for place in places]
    converted = convert(name, tmp_path / "raw", tmp_path / "converted")
    assert isinstance(converted, RetrievalDataset)
    assert (converted.captions, converted.caption_image) == (source.captions, source.caption_image)
    assert [converted.caption_image.count(index) for index in range(len(places))] == [facts["captions"]] * len(places)
    assert [place_of(converted.images[index]) for index in range(len(places))] == places
    distributed = open_benchmark(name, _renamed(tmp_path, name), "slip")
    assert distributed.captions == converted.captions and distributed.caption_image == converted.caption_image


@pytest.mark.parametrize("name", [name for name, facts in catalogue().items() if "family" not in facts])
def test_a_missing_dataset_is_named_with_its_licence_and_download_command(name, tmp_path):
    with pytest.raises(MissingDatasetError) as raised:
        open_benchmark(name, tmp_path, "slip")
    text = str(raised.value)
    folder = tmp_path / catalogue()[name].get("folder", name)
    assert f"{name} is not in {folder}" in text
    assert catalogue()[name]["licence"] in text and "{folder}" not in text
    command = text.split("To get it:")[1]
    assert str(folder) in command or "huggingface" in command or "hf://" in command


def test_a_wrong_number_of_classes_or_samples_is_an_error(tmp_path):
    WRITERS["dtd"](tmp_path / "dtd")
    with pytest.raises(ConfigError, match=r"dtd has the wrong size: .*classes 2 \(not 47\)"):
        open_benchmark("dtd", tmp_path, "slip")
    with pytest.raises(ConfigError, match=r"dtd has the wrong size: train 2 \(not 1880\), test 0 \(not"):
        check_size(sized("dtd", train=2, val=1880), catalogue()["dtd"])
    with pytest.raises(ConfigError, match=r"coco has the wrong size: images 2 \(not 5000\), captions 10 \(not 25000\)"):
        RETRIEVAL["coco"](tmp_path / "coco")
        open_benchmark("coco", tmp_path, "slip")


def sized(name: str, **counts: int) -> ClassificationDataset:
    """A dataset with the benchmark's number of classes and these numbers of samples."""
    splits = {split: range(count) for split, count in counts.items()}
    return ClassificationDataset(name, range(catalogue()[name]["classes"]), (), "top1", splits)


def test_sizes_are_those_of_the_papers_tables():
    """WPSE, table 4, with the tenth of train that it holds out; CLOOB, table A3."""
    titles = {facts["title"]: name for name, facts in catalogue().items()}
    wpse, cloob = stated_sizes("wpse_table4_datasets.csv"), stated_sizes("cloob_tableA3_datasets.csv")
    assert len(wpse) == 13
    for title, sizes in wpse.items():
        facts = catalogue()[titles[title]]
        samples = facts["samples"]
        assert (facts["classes"], samples["test"]) == (sizes["classes"], sizes["test_size"]), title
        if "val" in samples:
            assert (samples["train"], samples["val"]) == (sizes["train_size"], sizes["val_size"]), title
        else:
            assert samples["train"] == sizes["train_size"] + sizes["val_size"], title
            assert samples["train"] // 10 == sizes["val_size"], title
    names = {
        "Birdsnap": "birdsnap", "Country211": "country211", "Flowers102": "flowers", "GTSRB": "gtsrb",
        "ImageNet": "imagenet", "ImageNet V2": "imagenet_v2", "Stanford Cars": "cars", "UCF101": "ucf101",
    }  # fmt: skip
    for title, sizes in cloob.items():
        samples = catalogue()[names[title]]["samples"]
        assert samples["test"] == sizes["test_size"], title
        if "train" in samples:
            assert samples["train"] + samples.get("val", 0) == sizes["train_size"], title


def stated_sizes(table: str) -> dict[str, dict[str, int]]:
    """Numbers of a paper's table, by the title of the dataset and the metric."""
    rows = pd.read_csv(TABLES / table)
    return {title: dict(zip(part["metric"], part["value"], strict=True)) for title, part in rows.groupby("dataset")}


def test_train_and_validation_may_be_one_split_and_some_datasets_are_checked_by_their_total():
    check_size(sized("flowers", train=2040, test=6149), catalogue()["flowers"])
    check_size(sized("sun397", train=76128, val=10875, test=21751), catalogue()["sun397"])
    with pytest.raises(ConfigError, match=r"total 108753 \(not 108754\)"):
        check_size(sized("sun397", train=76128, val=10875, test=21750), catalogue()["sun397"])


def test_lists_of_imagenet_and_combined_templates_have_the_digests_of_the_catalogue():
    facts = catalogue()["imagenet"]
    own = [str(index) for index in range(1000)]
    names = prompts.class_names(own, facts["names"], "imagenet", Path("nowhere"))
    assert names[0] == "tench" and prompts.names_digest(names) == facts["names"]["digest"]
    short = prompts.templates(facts["templates"], "slip", "imagenet", Path("nowhere"))
    long = prompts.templates(facts["templates"], "clip", "imagenet", Path("nowhere"))
    assert (len(short), len(long)) == (7, 80) and all("{c}" in template for template in short + long)
    own = resources.files("timm").joinpath("data/_info/imagenet_r_synsets.txt").read_text().split()
    names = prompts.class_names(own, catalogue()["imagenet_r"]["names"], "imagenet_r", Path("nowhere"))
    assert len(set(names)) == 200 and names[own.index("n01484850")] == "great white shark"
    for name, count in (("birdsnap", 1), ("ucf101", 48)):
        combined = prompts.templates(catalogue()[name]["templates"], "clip", name, Path("nowhere"))
        assert len(set(combined)) == count
        assert all(template.endswith(("{c}.", "{c}, a type of bird.")) for template in combined)


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_templates_are_those_of_the_papers_if_their_package_is_installed(name, tmp_path):
    facts = catalogue()[name]["templates"]
    if facts.get("slip", facts)["source"] not in {"combined", "imagenet_simple"}:
        pytest.importorskip("clip_benchmark")
    assert all("{c}" in template for template in prompts.templates(facts, "slip", name, tmp_path))


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("cifar10", ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]),
        ("stl10", ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]),
        ("eurosat", sorted(catalogue()["eurosat"]["names"]["renamed"])),
        ("flowers", list(torchvision.datasets.Flowers102.classes)),
    ],
)
def test_the_datasets_own_names_become_those_of_the_papers(name, own, tmp_path):
    facts = catalogue()[name]["names"]
    names = prompts.class_names(own, facts, name, tmp_path)
    assert prompts.names_digest(names) == facts["digest"]
    # The order of the labels is preserved.
    assert prompts.class_names(own[::-1], facts, name, tmp_path) == names[::-1]


def test_class_names_and_templates_that_are_not_the_papers_are_refused_unless_a_file_corrects_them(tmp_path):
    own = ["plane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]
    with pytest.raises(ConfigError, match="class names of stl10 are not those of the papers.*eval.prompts=set"):
        prompts.class_names(own, catalogue()["stl10"]["names"], "stl10", tmp_path)
    (tmp_path / "classnames.txt").write_text("\n".join(["airplane", *own[1:]]) + "\n")
    assert prompts.class_names(own, catalogue()["stl10"]["names"], "stl10", tmp_path)[0] == "airplane"
    known = {"source": "cifar10", "digest": prompts.templates_digest(["one {c}", "two {c}"])}
    (tmp_path / "zeroshot_classification_templates.txt").write_text("one {c}\ntwo {c}\n")
    assert prompts.templates(known, "clip", "cifar10", tmp_path) == ["one {c}", "two {c}"]


@pytest.fixture
def lists(tmp_path, monkeypatch):
    """A stand-in for the clip-benchmark package: its two data files, and code that raises when it is imported."""
    folder = tmp_path / "packages" / "clip_benchmark"
    (folder / "datasets").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "datasets" / "__init__.py").write_text("raise RuntimeError('imported')")
    names, templates = {"gtsrb": ["stop", "go"]}, {"gtsrb": ["a sign: {c}"], "cifar10": ["other {c}"]}
    (folder / "datasets" / "en_classnames.json").write_text(json.dumps(names))
    (folder / "datasets" / "en_zeroshot_classification_templates.json").write_text(json.dumps(templates))
    monkeypatch.syspath_prepend(str(folder.parent))
    for module in [name for name in sys.modules if name.split(".")[0] == "clip_benchmark"]:
        monkeypatch.delitem(sys.modules, module)
    yield
    for module in [name for name in sys.modules if name.split(".")[0] == "clip_benchmark"]:
        del sys.modules[module]


def test_lists_of_the_clip_benchmark_package_are_read_and_verified(tmp_path, lists):
    facts = {"source": "gtsrb", "digest": prompts.names_digest(["stop", "go"])}
    assert prompts.class_names(["0", "1"], facts, "gtsrb", tmp_path) == ["stop", "go"]
    facts = {"source": "gtsrb", "digest": prompts.templates_digest(["a sign: {c}"])}
    assert prompts.templates(facts, "slip", "gtsrb", tmp_path) == ["a sign: {c}"]
    # A list that differs from the papers'.
    with pytest.raises(ConfigError, match="prompt templates of cifar10 are not those of the papers"):
        prompts.templates(catalogue()["cifar10"]["templates"], "slip", "cifar10", tmp_path)


def test_a_missing_package_of_lists_is_named_with_its_install_command(tmp_path, monkeypatch):
    # None in sys.modules marks a module that cannot be imported.
    monkeypatch.setitem(sys.modules, "clip_benchmark", None)
    with pytest.raises(ConfigError, match=r"pip install -e .*\[prompts\]"):
        prompts.templates(catalogue()["cifar10"]["templates"], "slip", "cifar10", tmp_path)


def test_the_datasets_own_class_names_are_used_when_asked(tmp_path, small):
    WRITERS["stl10"](tmp_path / "stl10")
    small("stl10", tmp_path / "stl10")
    assert open_benchmark("stl10", tmp_path, "set").class_names == ["airplane", "bird"]


def test_every_eval_configuration_names_datasets_of_the_catalogue():
    from tests.support.evaluation_sets import config_of

    for option in ("wpse", "kme", "cloob", "nuclr", "paper"):
        suite = config_of("clip", f"eval={option}")["eval"]
        named = {*suite["zero_shot"], *suite["linear_probe"], *suite["retrieval"]}
        assert named <= set(catalogue()), option
    assert named == set(WRITERS) | set(RETRIEVAL)


def test_the_protocol_knows_the_datasets_with_two_lists_of_templates():
    assert set(TWO_LISTS) == {name for name, facts in catalogue().items() if "clip" in facts.get("templates", ())}
