"""`clipzoo shards look` and `clipzoo shards contamination` on shards with planted faults and copies."""

from __future__ import annotations

import json
import os
import re

import numpy as np
import pandas
import pytest

from clipzoo.cli import __main__ as commands
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.tar import write_classification, write_retrieval
from tests.support.shards import opened, write_shard
from tests.support.textures import copies, jpeg, texture

COUNT = 40


def run_command(*words: object) -> None:
    options = commands._parser().parse_args(["shards", *map(str, words)])
    options.run(options)


def sample(number: int, image: bytes, caption: str, uid: str) -> tuple[str, dict[str, bytes]]:
    return f"{number:06d}", {"jpg": image, "txt": caption.encode(), "json": json.dumps({"uid": uid}).encode()}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Two shards: 40 textures, of which two occur twice, two have near copies, and three samples cannot be used."""
    folder = tmp_path_factory.mktemp("shards")
    samples = [sample(seed, jpeg(texture(seed)), f"number {seed}", f"u{seed}") for seed in range(COUNT)]
    samples += [sample(100 + seed, jpeg(texture(seed)), "ein Hund", f"exact{seed}") for seed in (3, 4)]
    samples += [sample(200 + seed, copies(texture(seed), seed)["size"], "собака", f"near{seed}") for seed in (3, 5)]
    samples += [sample(300, jpeg(texture(90))[:900], "cut", "cut"), sample(301, b"", "empty", "empty")]
    samples += [sample(302, jpeg(texture(91)), "...", "no words")]
    for number in range(2):
        write_shard(folder / f"{number:05d}.tar", samples[number::2])
    return folder


def test_the_page_counts_what_the_shards_hold_and_training_can_leave_out_the_copies(shards, tmp_path, capsys):
    run_command("look", shards, "--on", "local:1", "--output", tmp_path / "look")
    assert capsys.readouterr().out.splitlines()[-1] == f"page               {tmp_path / 'look' / 'index.html'}"
    numbers = json.loads((tmp_path / "look" / "numbers.json").read_text())
    assert numbers["samples"] == COUNT + 7 and numbers["usable samples"] == COUNT + 4
    assert (numbers["exact duplicates"], numbers["near-duplicates"]) == (2, 2)
    assert numbers["unusable samples"] == {"undecodable_image": 1, "empty_image": 1, "empty_caption": 1}
    assert numbers["scripts"] == {"Latin": COUNT + 2, "Cyrillic": 2}
    assert numbers["captions"] == {"ein Hund": 2, "собака": 2} and numbers["languages"] == {"short": COUNT + 4}
    assert numbers["percentiles"]["width"][0] < numbers["percentiles"]["width"][-1] == 160
    # "number 17": a word, two digits and both control tokens.
    assert numbers["percentiles"]["tokens"][3] == 5
    facts = pandas.read_parquet(tmp_path / "look" / "samples.parquet").set_index("uid")
    copied = {"u3": "exact3", "exact4": "u4", "near3": "exact3", "near5": "u5"}
    assert facts.copy_of.dropna().to_dict() == copied and len(facts) == COUNT + 7 and "pixels" not in facts
    assert facts.weight[["u3", "exact3", "near3", "u5", "u6", "cut"]].round(9).tolist() == [
        *[0.333333333] * 3,
        0.5,
        1,
        0,
    ]
    uids = np.load(tmp_path / "look" / "without_duplicates.npy")
    kept = opened(shards, uids=str(tmp_path / "look" / "without_duplicates.npy"), max_bad_fraction=0.5)
    assert len(uids) == kept.samples == COUNT
    # Copies are seen together as often as one image.
    weighted = opened(shards, weights=str(tmp_path / "look" / "samples.parquet"), index_folder=str(tmp_path / "index"))
    assert weighted.epoch_rows == COUNT
    page = (tmp_path / "look" / "index.html").read_text()
    for heading in ("Sizes", "Captions", "Unusable samples", "Duplicates", "Random pairs", "Longest captions"):
        assert f">{heading}</h2>" in page
    assert page.count("<figure>") == 3 + 3 * 24 and "http" not in re.sub(r"base64,[^\"]*", "", page)


@pytest.mark.medium
def test_near_duplicates_are_dropped_by_a_key_which_reads_what_the_command_has_read(shards, tmp_path, capsys):
    for path in shards.glob("*.tar"):
        (tmp_path / path.name).symlink_to(path)
    # Unusable samples are no copies: they are counted in training.
    settings = {"duplicates": "near", "max_bad_fraction": 0.5, "index_folder": str(tmp_path / "index")}
    assert opened(tmp_path, **settings).samples == COUNT + 3
    assert "43 of 47 samples are selected; left out: 4 by data.duplicates" in capsys.readouterr().err
    run_command("look", tmp_path, "--on", "local:1")
    settings["index_folder"] = str(tmp_path / "other")
    # Without the first image of three, the second one is kept.
    assert opened(tmp_path, **settings, where="uid != 'exact3'").samples == COUNT + 3
    assert "left out: 1 by data.where, 3 by data.duplicates" in capsys.readouterr().err
    assert (tmp_path / "index" / "maps").is_dir() and not (tmp_path / "other" / "maps").exists()


def test_languages_of_long_captions_are_counted(tmp_path):
    texts = {
        "en": "two children play football in a park", "de": "zwei Kinder spielen im Park Fußball",
        "fr": "deux enfants jouent au football dans un parc", "ja": "公園でサッカーをしている二人の子供",
        "short": "a cat",
    }  # fmt: skip
    write_shard(
        tmp_path / "a.tar", [sample(n, jpeg(texture(n)), text, str(n)) for n, text in enumerate(texts.values())]
    )
    run_command("look", tmp_path, "--on", "local:1")
    numbers = json.loads((tmp_path / "clipzoo_look" / "numbers.json").read_text())
    assert numbers["languages"] == dict.fromkeys(texts, 1)


def test_the_same_command_reads_no_image_again_and_another_setting_does(shards, tmp_path):
    command = ("look", shards, "--on", "local:1", "--output", tmp_path / "look")
    run_command(*command)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "look" / "maps").iterdir()}
    before = (tmp_path / "look" / "numbers.json").read_bytes()
    run_command(*command)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "look" / "maps").iterdir()} == times
    assert len(times) == 2 and (tmp_path / "look" / "numbers.json").read_bytes() == before
    run_command(*command, "--max-pixels", 100)
    numbers = json.loads((tmp_path / "look" / "numbers.json").read_text())
    assert numbers["usable samples"] == 0 and numbers["unusable samples"]["enormous_image"] == COUNT + 6
    assert len(list((tmp_path / "look" / "maps").iterdir())) == 4


def test_a_picture_that_was_damaged_since_it_was_read_is_named(tmp_path, caplog):
    write_shard(
        tmp_path / "a.tar", [sample(seed, jpeg(texture(seed)), f"number {seed}", f"u{seed}") for seed in range(3)]
    )
    run_command("look", tmp_path, "--on", "local:1")
    content, times = (tmp_path / "a.tar").read_bytes(), (tmp_path / "a.tar").stat()
    picture = jpeg(texture(1))
    (tmp_path / "a.tar").write_bytes(content.replace(picture, bytes(len(picture))))
    os.utime(tmp_path / "a.tar", ns=(times.st_atime_ns, times.st_mtime_ns))
    run_command("look", tmp_path, "--on", "local:1")
    assert "a.tar, sample 1, was damaged since it was read" in caplog.text
    assert "number 1" in (tmp_path / "clipzoo_look" / "index.html").read_text()


def test_tables_and_folders_are_looked_at_as_shards_are(tmp_path):
    for seed in range(12):
        (tmp_path / "pictures" / f"{seed}.jpg").parent.mkdir(exist_ok=True)
        (tmp_path / "pictures" / f"{seed}.jpg").write_bytes(jpeg(texture(seed % 10)))
    rows = [f"pictures/{seed}.jpg,number {seed}" for seed in range(12)]
    (tmp_path / "pairs.csv").write_text("\n".join(["filepath,title", *rows]))
    run_command("look", tmp_path / "pairs.csv", "--on", "local:1", "--output", tmp_path / "look")
    numbers = json.loads((tmp_path / "look" / "numbers.json").read_text())
    assert (numbers["samples"], numbers["exact duplicates"], numbers["near-duplicates"]) == (12, 2, 0)
    for seed in range(12):
        (tmp_path / "pictures" / f"{seed}.txt").write_text(f"number {seed}")
    run_command("look", tmp_path / "pictures", "--on", "local:1", "--output", tmp_path / "other")
    assert json.loads((tmp_path / "other" / "numbers.json").read_text())["samples"] == 12


def test_a_shard_that_is_missing_or_cut_is_looked_at_as_far_as_it_is_there(shards, tmp_path):
    (tmp_path / "00000.tar").write_bytes((shards / "00000.tar").read_bytes())
    (tmp_path / "00001.tar").write_bytes((shards / "00001.tar").read_bytes()[:60_000])
    run_command("look", tmp_path / "{00000..00002}.tar", "--on", "local:1")
    numbers = json.loads((tmp_path / "clipzoo_look" / "numbers.json").read_text())
    assert numbers["shards"] == 3 and 24 < numbers["samples"] < COUNT
    with pytest.raises(ConfigError, match="the shards hold no sample"):
        run_command("look", tmp_path / "nowhere.tar")


def test_evaluation_images_in_the_training_data_are_found_in_every_dataset_on_the_disk(shards, tmp_path, capsys):
    def encoded(seed: int) -> bytes:
        return copies(texture(seed), seed)["crop 0.97"] if seed % 2 else jpeg(texture(seed))

    # Seeds below COUNT are in the training data, the even ones with the same bytes.
    for name, seeds in (("flags", [6, 7, 8, 500, 501, 502]), ("clean", range(600, 606))):
        examples = [(encoded(seed), number % 2) for number, seed in enumerate(seeds)]
        write_classification(tmp_path / "sets" / name, class_names=["a", "b"], templates=["a {c}"], metric="top1",
                             recipe="", splits={"test": examples})  # fmt: skip
    pairs = [(encoded(seed), ["a caption"]) for seed in (9, 700, 701)]
    write_retrieval(tmp_path / "sets" / "pairs", recipe="", examples=pairs)
    command = ("contamination", shards, "--on", "local:1", "--output", tmp_path / "look", "--root", tmp_path / "sets")
    run_command(*command)
    found = json.loads((tmp_path / "look" / "contamination.json").read_text())
    counts = {name: (row["test images"], row["exact"], row["near"]) for name, row in found["datasets"].items()}
    assert counts == {"flags": (6, 2, 1), "clean": (6, 0, 0), "pairs": (3, 0, 1)}
    uids = set(np.load(tmp_path / "look" / "without_evaluation_images.npy").tolist())
    assert {"u6", "u7", "u8", "u9"}.isdisjoint(uids) and len(uids) == COUNT + 7 - 4
    page = (tmp_path / "look" / "contamination.html").read_text()
    assert page.count("<figure>") == 4 and "flags, image 0 | u6" in page
    run_command(*command, "--dataset", "clean")
    assert list(json.loads((tmp_path / "look" / "contamination.json").read_text())["datasets"]) == ["clean"]
    with pytest.raises(ConfigError, match="no evaluation dataset nowhere in"):
        run_command(*command, "--dataset", "nowhere")
    with pytest.raises(ConfigError, match=f"--root {tmp_path} has no evaluation dataset"):
        run_command(*command[:-1], tmp_path)
