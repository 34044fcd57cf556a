"""Packing, indexing and inspecting shards from the command line, as far as into training batches."""

import json

import pytest
from PIL import Image

from clipzoo.data.shards.writer import pairs_from_folder, pairs_from_karpathy, pairs_from_table, write_shards
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from tests.support.processes import run_script
from tests.support.shards import picture, shard_data, write_numbered


@pytest.fixture
def script(tmp_path_factory):
    """`script("NAME.py", ...)` runs a script and returns what it wrote to the terminal."""
    log = tmp_path_factory.mktemp("script") / "log"

    def output(name, *arguments, code=0):
        process = run_script(f"scripts/{name}", *arguments, log=log, code=code)
        return process.stdout + process.stderr

    return output


def pictures(folder, count):
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"p{number}.png").write_bytes(picture(number, (300, 200)))
        (folder / f"p{number}.txt").write_text(f"number {number}\n")
    return folder


def captions_of(shards, **changes):
    data = shard_data(shards, **changes)
    data.open(None, World())
    (batch,) = data.batches(seed=0, global_batch=data.samples, world=World(), start_step=0, stop_step=1, trim_text=True)
    return sorted((batch.text[:, 1] - 10).tolist())


@pytest.mark.medium
def test_a_folder_is_packed_indexed_and_inspected(script, tmp_path):
    pictures(tmp_path / "in" / "album", 7)
    (tmp_path / "in" / "lonely.jpg").write_bytes(picture(1, file_format="JPEG"))
    (tmp_path / "in" / "broken.jpg").write_bytes(b"no image")
    (tmp_path / "in" / "broken.txt").write_text("a caption")
    output = script("make_shards.py", tmp_path / "in", tmp_path / "out", "--samples-a-shard", 3)
    assert "7 samples in 3 shards" in output and "left out: " in output and "broken.jpg" in output
    assert captions_of(tmp_path / "out") == list(range(7))
    assert "7 samples in 3 shards" in script("index_shards.py", tmp_path / "out")
    output = script("inspect_shards.py", tmp_path / "out", "--sheet", tmp_path / "sheet.png")
    assert "7 samples in 3 shards" in output and "median 300" in output and "cannot be used: none" in output
    assert Image.open(tmp_path / "sheet.png").size[0] > 1000


@pytest.mark.medium
def test_scripts_report_invalid_arguments(script, tmp_path):
    write_numbered(tmp_path / "s", [4, 4])
    (tmp_path / "s" / "00001.tar").write_bytes((tmp_path / "s" / "00001.tar").read_bytes()[:5000])
    assert "00001.tar: 2 samples, truncated" in script("index_shards.py", tmp_path / "s")
    assert "damaged shards     1: 00001.tar" in script("inspect_shards.py", tmp_path / "s")
    assert "holds no *.tar" in script("index_shards.py", tmp_path, code=2)
    assert "the shards hold no sample" in script("index_shards.py", tmp_path / "nowhere.tar", code=2)


def test_rows_of_a_table_with_one_image_are_captions_of_one_sample(tmp_path):
    pictures(tmp_path / "images", 3)
    rows = [("images/p0.png", "number 0"), ("images/p1.png", "number 1"), ("images/p0.png", "number 20")]
    table = tmp_path / "pairs.tsv"
    table.write_text("\n".join("\t".join(row) for row in [("filepath", "title"), *rows]))
    pairs = pairs_from_table(table, "filepath", "title")
    assert list(write_shards(pairs, tmp_path / "out", samples_a_shard=10, shuffle_seed=None, shortest_side=None)) == []
    assert captions_of(tmp_path / "out") == [0, 1]
    assert captions_of(tmp_path / "out", caption_key="captions") in ([0, 1], [1, 20])
    assert json.loads((tmp_path / "out" / "00000_stats.json").read_text()) == {"successes": 2}
    with pytest.raises(ConfigError, match="no column 'url', but: filepath, title"):
        pairs_from_table(table, "url", "title")


def test_original_bytes_are_kept_and_large_images_scaled_where_asked(tmp_path):
    from clipzoo.data.shards.cache import ShardCache
    from clipzoo.data.shards.index_builder import load_or_build
    from clipzoo.data.shards.reader import ShardReader

    pairs = pairs_from_folder(pictures(tmp_path / "in", 1))
    for side, name in ((None, "whole"), (100, "scaled")):
        assert not list(write_shards(pairs, tmp_path / name, samples_a_shard=9, shuffle_seed=0, shortest_side=side))
        files = ShardCache(None, 1.0)
        index = load_or_build([str(tmp_path / name / "00000.tar")], files, [tmp_path / "index"])
        _, encoded = ShardReader(files, None).read(index, 0, 0)
        if side is None:
            assert encoded == picture(0, (300, 200))
        else:
            import io

            assert Image.open(io.BytesIO(encoded)).size == (150, 100)


def test_shards_are_never_overwritten(tmp_path):
    write_numbered(tmp_path / "out", [1])
    with pytest.raises(ConfigError, match="already has shards"):
        list(
            write_shards(
                pairs_from_folder(pictures(tmp_path / "in", 1)),
                tmp_path / "out",
                samples_a_shard=1,
                shuffle_seed=0,
                shortest_side=None,
            )
        )
    with pytest.raises(ConfigError, match="none of 0 images has a caption"):
        pairs_from_folder(tmp_path / "out")


def test_karpathys_splits_keep_all_captions(tmp_path):
    pictures(tmp_path / "coco" / "val2014", 4)
    entries = [
        {
            "filepath": "val2014",
            "filename": f"p{number}.png",
            "split": split,
            "sentences": [{"raw": f"number {number}"}, {"raw": f"number {number + 20}"}],
        }
        for number, split in enumerate(["train", "restval", "val", "train"])
    ]
    (tmp_path / "split.json").write_text(json.dumps({"images": entries}))
    pairs = pairs_from_karpathy(tmp_path / "split.json", tmp_path / "coco", ["train", "restval"])
    assert not list(write_shards(pairs, tmp_path / "out", samples_a_shard=10, shuffle_seed=0, shortest_side=None))
    assert captions_of(tmp_path / "out") == [0, 1, 3]
    assert {number % 20 for number in captions_of(tmp_path / "out", caption_key="captions")} == {0, 1, 3}
    with pytest.raises(ConfigError, match="no split 'rest', but: restval, train, val"):
        pairs_from_karpathy(tmp_path / "split.json", tmp_path / "coco", ["rest"])
