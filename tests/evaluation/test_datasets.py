"""The benchmark sets of the catalogue, each read from a tiny copy in its real layout through its real reader."""

from __future__ import annotations

import csv
import json
import sys
from importlib import resources
from pathlib import Path

import pytest
import torchvision.datasets

from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets import catalogue as catalogue_module
from clipzoo.evaluation.datasets import prompts
from clipzoo.evaluation.datasets.captions import RawPairs
from clipzoo.evaluation.datasets.catalogue import MissingSetError, catalogue, check_counts, open_benchmark, read_raw
from clipzoo.evaluation.datasets.convert import convert
from clipzoo.evaluation.datasets.examples import RawSet
from clipzoo.evaluation.datasets.tar_dataset import ClassificationSet, RetrievalSet
from clipzoo.runs.protocol import TWO_LISTS
from tests.support.paths import ROOT
from tests.support.raw_sets import RETRIEVAL, WRITERS, place_of

TABLES = ROOT / "clipzoo" / "report" / "paper_tables" / "published"
CLASSIFICATION = [name for name, facts in catalogue().items() if "captions" not in facts]


@pytest.fixture(autouse=True)
def any_content(monkeypatch):
    """torchvision compares these files with the digests of the real ones."""
    for kind in ("CIFAR10", "STL10"):
        monkeypatch.setattr(getattr(torchvision.datasets, kind), "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    monkeypatch.setattr("torchvision.datasets.flowers102.check_integrity", lambda *_: True)


@pytest.fixture
def small(monkeypatch):
    """The catalogue with the counts and names of a tiny copy, which it gives back as read."""

    def shrink(name: str, folder: Path) -> RawSet | RawPairs:
        raw, facts = read_raw(name, folder, catalogue()[name]), dict(catalogue()[name])
        if isinstance(raw, RawPairs):
            facts |= {"images": len(raw.captions)}
        else:
            line = "a {{c}}"
            facts["samples"] = {split: len(samples) for split, samples in raw.splits.items()}
            facts["classes"] = len(raw.class_names)
            facts["names"] = {"source": "own", "digest": prompts.names_digest(raw.class_names)}
            digest = prompts.templates_digest(["a {c}"])
            facts["templates"] = {"source": "combined", "line": line, "parts": [], "digest": digest}
        changed = {**catalogue(), name: facts}
        monkeypatch.setattr(catalogue_module, "catalogue", lambda: changed)
        monkeypatch.setattr("clipzoo.evaluation.datasets.convert.catalogue", lambda: changed)
        return raw

    return shrink


def test_every_set_of_the_catalogue_has_a_tiny_copy_below():
    assert set(catalogue()) == set(WRITERS) | set(RETRIEVAL)


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_a_set_reads_as_its_authors_distribute_it(name, tmp_path):
    expected = WRITERS[name](tmp_path)
    raw = read_raw(name, tmp_path, catalogue()[name])
    assert set(raw.splits) == set(expected)
    for split, names in expected.items():
        samples = raw.splits[split]
        assert len(samples) == len(names)
        # EuroSAT and Caltech-101 have thousands of alike pictures.
        chosen = range(len(names)) if len(names) < 50 else [0, len(names) // 2 - 1, len(names) // 2, len(names) - 1]
        for index in chosen:
            picture, label = samples[index]
            assert picture.mode == "RGB"
            assert raw.class_names[label] == names[index]
            assert place_of(picture) == painted(name, raw.class_names, label)


def painted(name: str, class_names: list[str], label: int) -> int:
    """The place by which the writer coloured a class: its label, or its turn among two labels that are far apart."""
    if name == "imagenet_v2":
        return [0, 3].index(label)
    return label


@pytest.mark.parametrize("name", [name for name in CLASSIFICATION if name not in {"eurosat", "caltech101"}])
def test_a_converted_set_holds_the_same_samples(name, tmp_path, small):
    WRITERS[name](tmp_path / "raw")
    raw = small(name, tmp_path / "raw")
    found = convert(name, tmp_path / "raw", tmp_path / "sets")
    assert isinstance(found, ClassificationSet) and found.metric == catalogue()[name]["metric"]
    for split, samples in raw.splits.items():
        assert len(found.splits[split]) == len(samples)
        for index in range(len(samples)):
            (ours, label), (theirs, expected_label) = found.splits[split][index], samples[index]
            assert label == expected_label
            assert ours.tobytes() == theirs.tobytes()
    # What lies there as shards opens like what lies there as distributed.
    direct = open_benchmark(name, _beside(tmp_path, name), "slip")
    assert direct.class_names == found.class_names and direct.templates == found.templates


def _beside(folder: Path, name: str) -> Path:
    (folder / "direct").mkdir()
    (folder / "raw").rename(folder / "direct" / name)
    return folder / "direct"


def test_a_damaged_shard_of_pairs_is_named_and_makes_no_smaller_gallery(tmp_path):
    RETRIEVAL["cc3m_validation"](tmp_path)
    shard = tmp_path / "00001.tar"
    shard.write_bytes(shard.read_bytes()[:2000])
    with pytest.raises(ConfigError, match="00001.tar: truncated"):
        read_raw("cc3m_validation", tmp_path, catalogue()["cc3m_validation"])


@pytest.mark.parametrize("name", RETRIEVAL)
def test_a_retrieval_set_reads_as_distributed_and_converted(name, tmp_path, small):
    RETRIEVAL[name](tmp_path / "raw")
    facts = catalogue()[name]
    raw = small(name, tmp_path / "raw")
    places = [place_of(raw.pictures[index]) for index in range(len(raw.pictures))]
    texts = [f"caption of {place}" for place in places]
    if name != "cc3m_validation":
        assert places == ([0, 3] if facts["split"] == "test" else [1])
        assert raw.captions == [[f"caption {turn} of {place}" for turn in range(5)] for place in places]
    else:
        # The one without an image is left out; a line break inside a caption is not a second caption.
        assert places == [0, 2, 3] and raw.captions == [[text] for text in texts]
    found = convert(name, tmp_path / "raw", tmp_path / "sets")
    assert isinstance(found, RetrievalSet)
    assert found.captions == [text for own in raw.captions for text in own]
    assert [found.caption_image.count(index) for index in range(len(places))] == [facts["captions"]] * len(places)
    assert [place_of(found.images[index]) for index in range(len(places))] == places
    direct = open_benchmark(name, _beside(tmp_path, name), "slip")
    assert direct.captions == found.captions and direct.caption_image == found.caption_image


@pytest.mark.parametrize("name", catalogue())
def test_a_missing_set_is_named_with_its_licence_and_the_way_to_get_it(name, tmp_path):
    with pytest.raises(MissingSetError) as raised:
        open_benchmark(name, tmp_path, "slip")
    text = str(raised.value)
    assert f"{name} is not in {tmp_path / name}" in text
    assert catalogue()[name]["licence"] in text and "{folder}" not in text
    assert str(tmp_path / name) in text.split("To get it:")[1] or "huggingface" in text


def test_a_wrong_count_is_an_error_not_another_number(tmp_path):
    WRITERS["dtd"](tmp_path / "dtd")
    with pytest.raises(ConfigError, match=r"dtd has the wrong number of classes: 2 \(not 47\)"):
        open_benchmark("dtd", tmp_path, "slip")
    with pytest.raises(ConfigError, match=r"dtd has the wrong number of samples: train 2 \(not 1880\), test 0 \(not"):
        check_counts("dtd", range(47), {"train": [1, 2], "val": range(1880)}, catalogue()["dtd"])
    with pytest.raises(ConfigError, match="coco has 2 pictures with 10 captions, not 5000 with 25000"):
        RETRIEVAL["coco"](tmp_path / "coco")
        open_benchmark("coco", tmp_path, "slip")


def test_counts_are_those_of_the_papers_tables():
    """WPSE, table 4, with the tenth that it holds out of train; CLOOB, table A3."""
    titles = {facts["title"]: name for name, facts in catalogue().items()}
    stated: dict[str, dict[str, int]] = {}
    with (TABLES / "wpse_table4_datasets.csv").open() as file:
        for row in csv.DictReader(file):
            stated.setdefault(row["dataset"], {})[row["metric"]] = int(row["value"])
    assert len(stated) == 13
    for title, sizes in stated.items():
        facts = catalogue()[titles[title]]
        samples = facts["samples"]
        assert facts["classes"] == sizes["classes"], title
        assert samples["test"] == sizes["test_size"], title
        if "val" in samples:
            assert (samples["train"], samples["val"]) == (sizes["train_size"], sizes["val_size"]), title
        else:
            assert samples["train"] == sizes["train_size"] + sizes["val_size"], title
            assert samples["train"] // 10 == sizes["val_size"], title
    names = {
        "Birdsnap": "birdsnap", "Country211": "country211", "Flowers102": "flowers", "GTSRB": "gtsrb",
        "ImageNet": "imagenet", "ImageNet V2": "imagenet_v2", "Stanford Cars": "cars", "UCF101": "ucf101",
    }  # fmt: skip
    with (TABLES / "cloob_tableA3_datasets.csv").open() as file:
        for row in csv.DictReader(file):
            facts = catalogue()[names[row["dataset"]]]
            if row["metric"] == "test_size":
                assert facts["samples"]["test"] == int(row["value"]), row
            if row["metric"] == "train_size" and "train" in facts["samples"]:
                assert facts["samples"]["train"] + facts["samples"].get("val", 0) == int(row["value"]), row


def test_train_and_validation_may_lie_together_and_a_total_may_be_all_that_is_known():
    def check(name: str, **counts: int) -> None:
        facts = catalogue()[name]
        check_counts(name, range(facts["classes"]), {split: range(count) for split, count in counts.items()}, facts)

    check("flowers", train=2040, test=6149)
    check("sun397", train=76128, val=10875, test=21751)
    with pytest.raises(ConfigError, match=r"total 108753 \(not 108754\)"):
        check("sun397", train=76128, val=10875, test=21750)


def test_imagenets_names_and_both_lists_of_prompts_have_the_digests_of_the_catalogue():
    facts = catalogue()["imagenet"]
    own = [str(index) for index in range(1000)]
    names = prompts.class_names(own, facts["names"], "imagenet", Path("nowhere"))
    assert names[0] == "tench" and prompts.names_digest(names) == facts["names"]["digest"]
    short = prompts.templates(facts["templates"], "slip", "imagenet", Path("nowhere"))
    long = prompts.templates(facts["templates"], "clip", "imagenet", Path("nowhere"))
    assert (len(short), len(long)) == (7, 80) and all("{c}" in each for each in short + long)


def test_imagenet_r_names_its_200_classes_as_imagenet_does(tmp_path):
    own = resources.files("timm").joinpath("data/_info/imagenet_r_synsets.txt").read_text().split()
    names = prompts.class_names(own, catalogue()["imagenet_r"]["names"], "imagenet_r", tmp_path)
    assert len(set(names)) == 200 and names[own.index("n01484850")] == "great white shark"


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_prompts_are_those_of_the_papers_where_their_package_is_installed(name, tmp_path):
    facts = catalogue()[name]["templates"]
    if facts.get("slip", facts)["source"] not in {"combined", "imagenet_simple"}:
        pytest.importorskip("clip_benchmark")
    assert all("{c}" in each for each in prompts.templates(facts, "slip", name, tmp_path))


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("cifar10", ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]),
        ("stl10", ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]),
        ("eurosat", sorted(catalogue()["eurosat"]["names"]["renamed"])),
        ("flowers", list(torchvision.datasets.Flowers102.classes)),
    ],
)
def test_names_of_the_set_itself_become_those_of_the_papers(name, own, tmp_path):
    facts = catalogue()[name]["names"]
    found = prompts.class_names(own, facts, name, tmp_path)
    assert prompts.names_digest(found) == facts["digest"]
    # The order is that of the set's labels, whatever it is.
    turned = prompts.class_names(own[::-1], facts, name, tmp_path)
    assert turned == found[::-1]


def test_other_class_names_are_refused_until_a_file_or_an_option_settles_them(tmp_path):
    own = ["plane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]
    with pytest.raises(ConfigError, match="class names of stl10 are not those of the papers.*eval.prompts=set"):
        prompts.class_names(own, catalogue()["stl10"]["names"], "stl10", tmp_path)
    (tmp_path / "classnames.txt").write_text("\n".join(["airplane", *own[1:]]) + "\n")
    assert prompts.class_names(own, catalogue()["stl10"]["names"], "stl10", tmp_path)[0] == "airplane"


def test_prompts_beside_the_set_are_taken_when_they_are_the_papers(tmp_path):
    known = {"source": "cifar10", "digest": prompts.templates_digest(["one {c}", "two {c}"])}
    (tmp_path / "zeroshot_classification_templates.txt").write_text("one {c}\ntwo {c}\n")
    assert prompts.templates(known, "clip", "cifar10", tmp_path) == ["one {c}", "two {c}"]


@pytest.mark.parametrize(("name", "count"), [("birdsnap", 1), ("ucf101", 48)])
def test_prompts_that_follow_a_pattern_are_combined_to_the_papers_list(name, count, tmp_path):
    found = prompts.templates(catalogue()[name]["templates"], "clip", name, tmp_path)
    assert len(set(found)) == count and all(each.endswith(("{c}.", "{c}, a type of bird.")) for each in found)


@pytest.fixture
def lists(tmp_path, monkeypatch):
    """A package of the name of clip-benchmark, with its two files of lists and code that nobody may import."""
    folder = tmp_path / "packages" / "clip_benchmark"
    (folder / "datasets").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "datasets" / "__init__.py").write_text("raise RuntimeError('imported')")
    names, templates = {"gtsrb": ["stop", "go"]}, {"gtsrb": ["a sign: {c}"], "cifar10": ["other {c}"]}
    (folder / "datasets" / "en_classnames.json").write_text(json.dumps(names))
    (folder / "datasets" / "en_zeroshot_classification_templates.json").write_text(json.dumps(templates))
    monkeypatch.syspath_prepend(str(folder.parent))
    for module in [each for each in sys.modules if each.split(".")[0] == "clip_benchmark"]:
        monkeypatch.delitem(sys.modules, module)


def test_lists_of_the_clip_benchmark_package_are_read_and_verified(tmp_path, lists):
    facts = {"source": "gtsrb", "digest": prompts.names_digest(["stop", "go"])}
    assert prompts.class_names(["0", "1"], facts, "gtsrb", tmp_path) == ["stop", "go"]
    facts = {"source": "gtsrb", "digest": prompts.templates_digest(["a sign: {c}"])}
    assert prompts.templates(facts, "slip", "gtsrb", tmp_path) == ["a sign: {c}"]
    # One that has changed since.
    with pytest.raises(ConfigError, match="prompts of cifar10 are not those of the papers"):
        prompts.templates(catalogue()["cifar10"]["templates"], "slip", "cifar10", tmp_path)


def test_the_package_that_has_a_list_is_named_when_it_is_not_installed(tmp_path, monkeypatch):
    # None in sys.modules is how Python marks a module that cannot be imported.
    monkeypatch.setitem(sys.modules, "clip_benchmark", None)
    with pytest.raises(ConfigError, match="pip install --no-deps clip-benchmark"):
        prompts.templates(catalogue()["cifar10"]["templates"], "slip", "cifar10", tmp_path)


def test_the_sets_own_prompts_are_left_alone_when_asked(tmp_path, small):
    WRITERS["stl10"](tmp_path / "stl10")
    small("stl10", tmp_path / "stl10")
    found = open_benchmark("stl10", tmp_path, "set")
    assert found.class_names == ["airplane", "bird"]


def test_every_eval_configuration_names_sets_of_the_catalogue():
    from tests.support.evaluation_sets import config_of

    for option in ("wpse", "kme", "cloob", "nuclr", "paper"):
        suite = config_of("clip", f"eval={option}")["eval"]
        named = {*suite["zero_shot"], *suite["linear_probe"], *suite["retrieval"]}
        assert named <= set(catalogue()), option
    assert named == set(catalogue())


def test_the_protocol_names_the_sets_whose_prompts_depend_on_the_paper():
    assert set(TWO_LISTS) == {name for name in CLASSIFICATION if "clip" in catalogue()[name]["templates"]}
