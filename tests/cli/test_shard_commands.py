"""Packing, indexing and looking at shards from the command line, as far as into training batches."""

import json
import subprocess
import sys
import tarfile
import time
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from clipzoo.cli import __main__ as commands
from clipzoo.data.index import load_or_build
from clipzoo.data.locations import ShardCache
from clipzoo.data.reader import ShardReader
from clipzoo.data.write import Pair, ShardWriter, hold_out, pairs_from_folder, pairs_from_karpathy, pairs_from_table
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.io import WriteError, read_table
from tests.support.disks import fill, small_disk
from tests.support.paths import ROOT
from tests.support.processes import run_script
from tests.support.shards import picture, shard_data, write_numbered


@pytest.fixture
def command(tmp_path_factory):
    """`command("shards make", ...)` runs a command and returns its terminal output."""
    log = tmp_path_factory.mktemp("command") / "log"

    def output(words, *arguments, code=0):
        process = run_script("clipzoo", *words.split(), *arguments, log=log, code=code)
        return process.stdout + process.stderr

    return output


def pictures(folder, count):
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"p{number}.png").write_bytes(picture(number, (300, 200)))
        (folder / f"p{number}.txt").write_text(f"number {number}\n")
    return folder


def run_command(words):
    options = commands._parser().parse_args(words)
    options.run(options)


def packed(pairs, folder, progress=lambda done, total: None, **changes):
    writer = ShardWriter(**{"samples_a_shard": 10, "shuffle_seed": 0, "shortest_side": None} | changes)
    return writer.write(pairs, folder, progress)


def captions_of(shards, **changes):
    data = shard_data(shards, **changes)
    data.open(None, World())
    (batch,) = data.batches(seed=0, global_batch=data.samples, world=World(), start_step=0, stop_step=1, trim_text=True)
    return sorted((batch.text[:, 1] - 10).tolist())


@pytest.mark.medium
def test_a_folder_is_packed_indexed_and_looked_at(command, tmp_path):
    pictures(tmp_path / "in" / "album", 7)
    (tmp_path / "in" / "lonely.jpg").write_bytes(picture(1, file_format="JPEG"))
    (tmp_path / "in" / "broken.jpg").write_bytes(b"no image")
    (tmp_path / "in" / "broken.txt").write_text("a caption")
    for name in ("drawing.svg", "drawing.txt", "README"):
        (tmp_path / "in" / name).write_text("a caption")
    output = command("shards make", tmp_path / "in", tmp_path / "out", "--samples-a-shard", 3)
    assert "7 samples in 3 shards" in output
    assert "left out: 1 undecodable image, 1 missing caption" in output
    assert "other files, which are not read: 1 without extension, 1 .svg, 1 .txt" in output
    rows = read_table(tmp_path / "out" / "left_out.tsv", ["file", "kind", "reason"])
    assert {Path(row["file"]).name: row["kind"] for row in rows} == {
        "broken.jpg": "undecodable_image", "lonely.jpg": "missing_caption",
        **dict.fromkeys(["drawing.svg", "drawing.txt", "README"], "no_image_file"),
    }  # fmt: skip
    assert captions_of(tmp_path / "out") == list(range(7))
    assert "7 samples in 3 shards" in command("shards index", tmp_path / "out")
    output = command("shards look", tmp_path / "out", "--on", "local:1")
    assert "usable samples     7\n" in output and "median 300" in output and "unusable samples   none" in output


@pytest.mark.medium
def test_commands_report_invalid_arguments(command, tmp_path):
    write_numbered(tmp_path / "s", [4, 4])
    (tmp_path / "s" / "00001.tar").write_bytes((tmp_path / "s" / "00001.tar").read_bytes()[:5000])
    assert "00001.tar: 2 samples, truncated" in command("shards index", tmp_path / "s")
    assert "holds no *.tar" in command("shards index", tmp_path, code=2)
    assert "damaged shards     1: 00001.tar" in command("shards look", tmp_path / "s", "--on", "local:1")
    assert "the shards hold no sample" in command("shards index", tmp_path / "nowhere.tar", code=2)


def test_no_caption_is_held_out_and_trained_on(tmp_path):
    linked = [["bridge", "y"], ["y  "], ["z", "bridge"]]
    captions = [[f"caption {number % 40}"] for number in range(120)] + [["x"]] * 30 + linked
    pairs = [Pair(tmp_path / f"{number}.png", texts) for number, texts in enumerate(captions)]
    train, held_out = hold_out(pairs, 0.1, seed=0)
    assert len(train) + len(held_out) == len(pairs) and 12 <= len(held_out) <= 15

    def words(side):
        return {" ".join(text.split()) for pair in side for text in pair.captions}

    assert not words(train) & words(held_out)
    # Neither the order of the pairs nor chance decides, and another seed holds out other captions.
    assert words(hold_out(pairs[::-1], 0.1, seed=0)[1]) == words(held_out) != words(hold_out(pairs, 0.1, seed=1)[1])
    # A group that is larger than the share stays in training; pairs linked by captions of one image are a group.
    for seed in range(20):
        chosen = words(hold_out(pairs, 0.1, seed)[1])
        assert "x" not in chosen and len({"bridge", "y", "z"} & chosen) in (0, 3)
    with pytest.raises(ConfigError, match="holds out 0"):
        hold_out(pairs, 0.001, seed=0)


def test_held_out_shards_are_written_beside_and_never_overwritten(tmp_path, capsys):
    pictures(tmp_path / "in", 20)
    command = ["shards", "make", str(tmp_path / "in"), str(tmp_path / "out"), "--hold-out", "20%", "--processes", "1"]
    run_command(command)
    assert "4 samples in 1 shard" in capsys.readouterr().out
    held_out, train = captions_of(tmp_path / "out" / "held_out"), captions_of(tmp_path / "out")
    assert len(held_out) == 4 and sorted(held_out + train) == list(range(20))
    for shard in (tmp_path / "out").glob("*.tar"):
        shard.unlink()
    with pytest.raises(ConfigError, match="out already has files"):
        run_command(command[:-4])


def test_a_killed_command_leaves_no_shards_and_the_next_one_writes_all(tmp_path):
    pictures(tmp_path / "in", 600)
    command = ["shards", "make", str(tmp_path / "in"), str(tmp_path / "out"), "--samples-a-shard", "10"]
    killed = subprocess.Popen([sys.executable, "-m", "clipzoo.cli", *command, "--processes", "1"], cwd=ROOT)
    partial = tmp_path / ".out.partial"
    while len(list(partial.glob("*.tar"))) < 3 and killed.poll() is None:
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    assert list(partial.glob("*.tar")) and not (tmp_path / "out").exists()
    run_command(command)
    assert len(list((tmp_path / "out").glob("*.tar"))) == 60 and not partial.exists()
    with pytest.raises(ConfigError, match=r"already has files \(00000.tar\)"):
        run_command(command)


@pytest.mark.parametrize("space", [0, 70_000])
def test_a_full_disk_is_named_with_the_path_and_keeps_nothing(space, tmp_path):
    pictures(tmp_path / "in" / "train" / "album", 60)
    for folder in ("train/other", "test/album", "test/other"):
        pictures(tmp_path / "in" / folder, 2)
    run_command(["datasets", "make", str(tmp_path / "in"), str(tmp_path / "set"), "--processes", "1"])
    with small_disk(tmp_path / "disk", size="1m") as disk:
        fill(disk, leave=space)
        before = sorted(disk.iterdir())
        for command in (["shards", "make", str(tmp_path / "in/train")], ["datasets", "prompts", str(tmp_path / "set")]):
            with pytest.raises(WriteError, match=rf"could not write {disk}/.*: No space left on device \(0.* MB free"):
                run_command([*command, str(disk / "out")])
            assert sorted(disk.iterdir()) == before


def test_rows_of_a_table_with_one_image_are_captions_of_one_sample(tmp_path):
    pictures(tmp_path / "images", 3)
    rows = [("images/p0.png", "number 0"), ("images/p1.png", "number 1"), ("images/p0.png", "number 20")]
    table = tmp_path / "pairs.tsv"
    table.write_text("\n".join("\t".join(row) for row in [("filepath", "title"), *rows]))
    pairs = pairs_from_table(table, "filepath", "title")
    assert packed(pairs, tmp_path / "out")[1] == []
    assert captions_of(tmp_path / "out") == [0, 1]
    assert captions_of(tmp_path / "out", caption_key="captions") in ([0, 1], [1, 20])
    assert json.loads((tmp_path / "out" / "00000_stats.json").read_text()) == {"successes": 2}
    with pytest.raises(ConfigError, match="no column 'url', but: filepath, title"):
        pairs_from_table(table, "url", "title")


def test_columns_of_a_table_are_kept_in_the_json(tmp_path):
    pictures(tmp_path / "images", 2)
    table = tmp_path / "pairs.csv"
    table.write_text(
        "filepath,title,album\nimages/p0.png,number 0,7\nimages/p1.png,number 1,8\nimages/p0.png,number 2,9\n"
    )
    run_command(["shards", "make", str(table), str(tmp_path / "out"), "--keep", "album"])
    with tarfile.open(tmp_path / "out" / "00000.tar") as archive:
        facts = [json.load(archive.extractfile(member)) for member in archive if member.name.endswith("json")]
    assert {entry["caption"]: entry["album"] for entry in facts} == {"number 0": "7", "number 1": "8"}


@pytest.mark.parametrize(("side", "size"), [(None, (300, 200)), (100, (150, 100))])
def test_original_bytes_are_kept_and_large_images_scaled_where_asked(side, size, tmp_path):
    pairs, _ = pairs_from_folder(pictures(tmp_path / "in", 1))
    assert packed(pairs, tmp_path / "out", shortest_side=side)[1] == []
    files = ShardCache(None, 1.0)
    index = load_or_build([str(tmp_path / "out" / "00000.tar")], files, [tmp_path / "index"])
    encoded = ShardReader(files).sample(index, 0, 0).image()
    assert Image.open(BytesIO(encoded)).size == size and (encoded == picture(0, (300, 200))) == (side is None)


def test_a_folder_without_captions_is_named(tmp_path):
    write_numbered(tmp_path / "out", [1])
    with pytest.raises(ConfigError, match="none of 0 images has a caption"):
        pairs_from_folder(tmp_path / "out")


def test_karpathys_splits_keep_all_captions(tmp_path):
    pictures(tmp_path / "coco" / "val2014", 4)
    entries = []
    for number, split in enumerate(["train", "restval", "val", "train"]):
        sentences = [{"raw": f"number {number}"}, {"raw": f"number {number + 20}"}]
        entries.append({"filepath": "val2014", "filename": f"p{number}.png", "split": split, "sentences": sentences})
    (tmp_path / "split.json").write_text(json.dumps({"images": entries}))
    pairs = pairs_from_karpathy(tmp_path / "split.json", tmp_path / "coco", ["train", "restval"])
    assert packed(pairs, tmp_path / "out")[1] == []
    assert captions_of(tmp_path / "out") == [0, 1, 3]
    assert {number % 20 for number in captions_of(tmp_path / "out", caption_key="captions")} == {0, 1, 3}
    with pytest.raises(ConfigError, match="no split 'rest', but: restval, train, val"):
        pairs_from_karpathy(tmp_path / "split.json", tmp_path / "coco", ["rest"])


def test_the_paths_of_a_table_that_are_all_wrong_are_an_error_which_names_them(command, tmp_path):
    table = tmp_path / "pairs.csv"
    table.write_text("filepath,title\nmissing.png,a dog\n.,a cat\n")
    output = command("shards make", table, tmp_path / "out", code=2)
    assert "none of 2 images can be used (1 missing file, 1 unreadable file). First: " in output
    assert f"missing.png: there is no such file. Paths are relative to {tmp_path}/." in output
    assert len((tmp_path / "out" / "left_out.tsv").read_text().splitlines()) == 3
    assert not list((tmp_path / "out").glob("*.tar"))
    table.write_text("filepath,title\n")
    with pytest.raises(ConfigError, match=r"pairs\.csv has no rows"):
        pairs_from_table(table, "filepath", "title")


STAMP = "a dog\n\nde.utf8=ein Hund\nfr.utf8=un chien\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (None, ["a dog de.utf8=ein Hund fr.utf8=un chien"]),
        ("1", ["a dog"]),
        ("4", ["fr.utf8=un chien"]),
        ("de.utf8=", ["ein Hund"]),
        ("all", ["a dog", "de.utf8=ein Hund", "fr.utf8=un chien"]),
        ("2", "empty_caption"),
        ("9", "missing_caption"),
        ("es.utf8=", "missing_caption"),
    ],
)
def test_a_line_of_a_caption_file_is_chosen_by_its_number_or_its_beginning(line, expected, tmp_path):
    folder = pictures(tmp_path / "in", 1)
    (folder / "p0.txt").write_text(STAMP)
    pairs, _ = pairs_from_folder(folder, line)
    _, left_out = packed(pairs, tmp_path / "out")
    if isinstance(expected, str):
        assert [entry.kind for entry in left_out] == [expected]
        return
    with tarfile.open(tmp_path / "out" / "00000.tar") as archive:
        assert json.loads(archive.extractfile("000000000.json").read())["captions"] == expected


def test_pairs_that_training_would_refuse_are_left_out_and_files_are_named_by_their_format(tmp_path):
    folder, most = pictures(tmp_path / "in", 1), 300 * 200 - 1
    _, (entry,) = packed(pairs_from_folder(folder)[0], tmp_path / "whole", max_pixels=most)
    assert entry.kind == "enormous_image"
    assert not packed(pairs_from_folder(folder)[0], tmp_path / "scaled", max_pixels=most, shortest_side=100)[1]
    (folder / "p0.txt").write_bytes("caf\u00e9".encode("latin-1"))
    _, (entry,) = packed(pairs_from_folder(folder)[0], tmp_path / "latin")
    assert entry.kind == "caption_not_utf8"
    (tmp_path / "one.dat").write_bytes(picture(1))
    (tmp_path / "pairs.csv").write_text("filepath,title\none.dat,number 1\n")
    packed(pairs_from_table(tmp_path / "pairs.csv", "filepath", "title"), tmp_path / "out")
    assert captions_of(tmp_path / "out") == [1]


@pytest.mark.medium
def test_several_processes_write_the_shards_of_one(tmp_path, monkeypatch):
    monkeypatch.setattr("clipzoo.data.write._PAIRS_A_PROCESS", 10)
    folder = pictures(tmp_path / "in", 40)
    (folder / "p7.png").write_bytes(b"no image")
    seen = []
    for processes, name in ((1, "one"), (2, "two")):
        pairs, _ = pairs_from_folder(folder)
        progress = {"processes": processes, "progress": lambda *counts: seen.append(counts)}
        shards, left_out = packed(pairs, tmp_path / name, **progress)
        assert (len(shards), len(left_out)) == (4, 1)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    assert seen == [(done, 40) for done in (10, 20, 30, 40)] * 2


# `clipzoo datasets make`


def make_dataset(*words: object) -> None:
    run_command(["datasets", "make", *map(str, words)])


def test_the_command_writes_a_dataset_and_prints_how_to_evaluate_it(tmp_path, capsys):
    for name in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "p.png").write_bytes(picture(0))
    (tmp_path / "in" / "test" / "a" / "p.svg").write_text("<svg/>")
    (tmp_path / "in" / "test" / "c").mkdir()
    out = tmp_path / "sets" / "letters"
    make_dataset(tmp_path / "in", out, "--template", "the letter {c}")
    assert capsys.readouterr().out.splitlines() == [
        f"{out}: 2 classes; images: test 2, train 2",
        "other files, which are not read: 1 .svg",
        f"{out}/left_out.tsv names each of them",
        "classes left out, without an image in test: c",
        f"evaluate with: eval=none eval.root={tmp_path}/sets eval.zero_shot=[letters] eval.linear_probe=[letters]",
    ]
    with pytest.raises(ConfigError, match="letters exists already: remove it to write the dataset again"):
        make_dataset(tmp_path / "in", out)


def test_a_table_of_captions_becomes_a_retrieval_dataset(tmp_path, capsys):
    (tmp_path / "p.png").write_bytes(picture(0))
    (tmp_path / "t.csv").write_text("file,text\np.png,one\np.png,two\n")
    make_dataset(tmp_path / "t.csv", tmp_path / "pairs", "--image", "file", "--caption", "text")
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/pairs: 2 captions; images: test 1",
        "2 captions, all distinct",
        f"evaluate with: eval=none eval.root={tmp_path} eval.retrieval=[pairs]",
    ]


def test_mistakes_on_the_command_line_are_named(tmp_path):
    (tmp_path / "table.csv").write_text("filepath,name\n")
    table = tmp_path / "table.csv"
    for words, message in {
        (tmp_path / "none", tmp_path / "out"): "none does not exist",
        (table, tmp_path / "out"): "give the column of .*--label COLUMN",
        (table, tmp_path / "out", "--captions"): "--captions is for a folder",
        (table, tmp_path / "out", "--label", "name", "--caption", "name"): "--label is for a dataset with classes",
        (table, tmp_path / "out", "--label", "class"): "has no column 'class', but: filepath, name",
        (table, tmp_path / "out", "--label", "name"): "out needs at least two classes and has 0",
    }.items():
        with pytest.raises(ConfigError, match=message):
            make_dataset(*words)
