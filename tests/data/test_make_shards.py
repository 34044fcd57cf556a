"""`clipzoo shards make`: an interrupted command continues, formats, odd images, and shards and tables as sources."""

import io
import json
import subprocess
import sys
import tarfile
import time

import numpy as np
import pytest
from PIL import Image

from clipzoo.cli import __main__ as commands
from clipzoo.data.images import decode
from clipzoo.data.index import FOLDER, index_name, load, load_or_build
from clipzoo.data.locations import ShardCache
from clipzoo.data.tar import TARS
from clipzoo.errors import ConfigError
from clipzoo.evaluation.validation import open_validation
from tests.support.paths import ROOT
from tests.support.shards import batches_of, numbered, opened, picture, write_numbered, write_shard


def make(*words):
    options = commands._parser().parse_args(["shards", "make", *map(str, words)])
    options.run(options)


def pictures(folder, count, size=(60, 40)):
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"p{number:03d}.png").write_bytes(picture(number, size))
        (folder / f"p{number:03d}.txt").write_text(f"number {number}\n")
    return folder


def contents(folder):
    """Return the bytes of all files but the index, which holds times of modification."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and FOLDER not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def images_of(folder):
    images = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as archive:
            entries = {member.name: archive.extractfile(member).read() for member in archive}
        for name, content in entries.items():
            if not name.endswith((".txt", ".json")):
                images[json.loads(entries[f"{name.partition('.')[0]}.json"])["file"]] = content
    return images


@pytest.mark.medium
def test_a_killed_command_continues_and_the_bytes_are_those_of_an_undisturbed_one_with_more_processes(tmp_path, capsys):
    source = pictures(tmp_path / "in", 300)
    for number in (3, 77, 78):
        (source / f"p{number:03d}.png").write_bytes(b"no image")
    options = ("--samples-a-shard", 10, "--shortest-side", 20, "--hold-out", "30%")
    make(source, tmp_path / "whole", *options, "--processes", 2)
    expected = capsys.readouterr().out.replace("whole", "out")
    command = ["shards", "make", source, tmp_path / "out", *options, "--processes", 1]
    killed = subprocess.Popen([sys.executable, "-m", "clipzoo.cli", *map(str, command)], cwd=ROOT)
    partial = tmp_path / ".out.partial"
    while len(list(partial.glob("*_stats.json"))) < 4 and killed.poll() is None:
        time.sleep(0.005)
    killed.kill()
    killed.wait()
    finished = {path.name: path.stat().st_mtime_ns for path in partial.glob("*_stats.json")}
    assert not (tmp_path / "out").exists() and 4 <= len(finished) < 21
    with pytest.raises(ConfigError, match=r"with another --shortest-side \(20, not 16\): repeat that command, or rem"):
        make(source, tmp_path / "out", *options, "--shortest-side", 16)
    (source / "p299.txt").rename(source / "p299.text")
    with pytest.raises(ConfigError, match="with another --source"):
        make(source, tmp_path / "out", *options)
    (source / "p299.text").rename(source / "p299.txt")
    make(*command[2:])
    assert capsys.readouterr().out == expected
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in finished} == finished
    whole = {name: content.replace(b"whole", b"out") for name, content in contents(tmp_path / "whole").items()}
    assert contents(tmp_path / "out") == whole and not partial.exists()
    assert len(list((tmp_path / "out").glob("*.tar"))) == 21 and "3 undecodable image" in expected


def test_the_index_is_written_with_the_shards(tmp_path):
    make(pictures(tmp_path / "in", 25), tmp_path / "out", "--samples-a-shard", 10)
    shards = [str(path) for path in sorted((tmp_path / "out").glob("*.tar"))]
    index = load(index_name(shards, TARS), shards, [tmp_path / "out" / FOLDER])
    new = load_or_build(shards, ShardCache(None, 1.0), [tmp_path / "new"])
    assert index.fingerprint == new.fingerprint and index.captions == new.captions and index.samples == 25
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "out" / FOLDER).iterdir())
    assert opened(tmp_path / "out").samples == 25
    assert before == sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "out" / FOLDER).iterdir())


def test_a_shard_without_a_usable_sample_is_not_written(tmp_path):
    source = pictures(tmp_path / "in", 6)
    for number in (2, 3):
        (source / f"p{number:03d}.png").write_bytes(b"")
    make(source, tmp_path / "out", "--samples-a-shard", 2, "--shuffle-seed", -1)
    assert [path.stem for path in sorted((tmp_path / "out").glob("*.tar"))] == ["00000", "00002"]
    assert opened(tmp_path / "out").samples == 4


def odd_images():
    """Return images that need a conversion, by the name of their file."""
    red, image = Image.new("RGBA", (80, 60), (255, 0, 0, 128)), Image.open(io.BytesIO(picture(40, (80, 60))))
    deep = Image.fromarray(np.linspace(0, 65535, 80 * 60).reshape(60, 80).astype(np.uint16))
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds = {
        "rgba.png": (red, {}), "sixteen.png": (deep, {}), "palette.gif": (image.convert("P"), {}),
        "cmyk.jpg": (image.convert("CMYK"), {}), "rotated.jpg": (image, {"exif": exif}),
        "animated.webp": (image, {"save_all": True, "append_images": [red.convert("RGB")], "lossless": True}),
    }  # fmt: skip
    files = {}
    for name, (picture_, options) in kinds.items():
        stream = io.BytesIO()
        picture_.save(stream, Image.registered_extensions()[f".{name.rpartition('.')[2]}"], **options)
        files[name] = stream.getvalue()
    return files


@pytest.mark.parametrize("form", ["jpg", "webp", "avif"])
def test_odd_images_are_scaled_as_training_decodes_them(form, tmp_path):
    (tmp_path / "in").mkdir()
    for name, content in odd_images().items():
        (tmp_path / "in" / name).write_bytes(content)
        (tmp_path / "in" / name).with_suffix(".txt").write_text("number 1")
    make(tmp_path / "in", tmp_path / "out", "--shortest-side", 30, "--image-format", form)
    images = images_of(tmp_path / "out")
    assert images.keys() == odd_images().keys()
    for name, content in images.items():
        image = Image.open(io.BytesIO(content))
        # A rotation in EXIF is not applied, as in training, and not stored.
        assert (image.size, image.mode, len(image.getexif())) == ((40, 30), "RGB", 0)
        assert image.format == {"jpg": "JPEG"}.get(form, form.upper()) and getattr(image, "n_frames", 1) == 1
        scaled = decode(odd_images()[name]).resize((40, 30), Image.Resampling.LANCZOS)
        assert np.abs(np.asarray(decode(content), float) - np.asarray(scaled)).mean() < 4, name
    assert len(list(batches_of(opened(tmp_path / "out"), 1, 6))) == 1


def test_images_are_encoded_again_only_for_a_scale_or_another_format(tmp_path):
    (tmp_path / "in").mkdir()
    files = {
        "a.webp": picture(1, (60, 40), "WEBP"),
        "b.png": picture(2, (60, 40)),
        "c.webp": picture(3, (90, 80), "WEBP"),
    }
    for name, content in files.items():
        (tmp_path / "in" / name).write_bytes(content)
        (tmp_path / "in" / name).with_suffix(".txt").write_text("number 1")
    make(tmp_path / "in", tmp_path / "out", "--shortest-side", 40, "--image-format", "webp")
    images = images_of(tmp_path / "out")
    assert images["a.webp"] == files["a.webp"]
    assert {Image.open(io.BytesIO(content)).format for content in images.values()} == {"WEBP"}
    make(tmp_path / "in", tmp_path / "low", "--shortest-side", 40, "--image-format", "webp", "--quality", 20)
    assert len(images_of(tmp_path / "low")["c.webp"]) < len(images["c.webp"])


def test_an_image_that_a_format_cannot_hold_is_counted(tmp_path, capsys):
    source = pictures(tmp_path / "in", 2)
    Image.new("1", (16_400, 8)).save(source / "p001.png")
    make(source, tmp_path / "out", "--image-format", "webp")
    assert "left out: 1 unencodable image" in capsys.readouterr().out
    assert "16400 x 8 as webp" in (tmp_path / "out" / "left_out.tsv").read_text()


def write_source(folder, form):
    """Write 20 samples in two files of a format, and return the source for the command."""
    pa, samples = pytest.importorskip("pyarrow"), numbered(0, 20)
    folder.mkdir()
    if form in ("tars", "wids"):
        write_numbered(folder, [10, 10])
        names = [{"url": path.name} for path in sorted(folder.glob("*.tar"))]
        (folder / "index.json").write_text(json.dumps({"shardlist": names}))
        return folder / "index.json" if form == "wids" else folder / "{00000..00001}.tar"
    for part in range(2):
        rows = samples[part * 10 : part * 10 + 10]
        table = {"image": [row["png"] for _, row in rows], "text": [row["txt"].decode() for _, row in rows]}
        if form == "jsonl":
            paths = [folder / f"{key}.png" for key, _ in rows]
            for path, (_, row) in zip(paths, rows, strict=True):
                path.write_bytes(row["png"])
            lines = [{"image": path.name, "text": text} for path, text in zip(paths, table["text"], strict=True)]
            (folder / f"{part}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        elif form == "parquet":
            from pyarrow import parquet

            parquet.write_table(pa.table(table), folder / f"{part}.parquet")
        else:
            with pa.ipc.new_file(str(folder / f"{part}.arrow"), pa.table(table).schema) as writer:
                writer.write_table(pa.table(table))
    return folder if form == "arrow" else folder / f"*.{form}"


@pytest.mark.medium
@pytest.mark.parametrize("form", ["tars", "wids", "parquet", "arrow", "jsonl"])
def test_shards_and_tables_become_shards_with_the_same_images_and_captions(form, tmp_path, monkeypatch):
    source, size = write_source(tmp_path / "in", form), 20 if form == "parquet" else 8
    if form in ("parquet", "arrow"):
        # Two processes read the images of one shard, or write a shard each.
        monkeypatch.setattr("clipzoo.data.write._PAIRS_A_PROCESS", 5)
    options = ("--samples-a-shard", size, "--hold-out", "20%", "--shuffle-seed", -1, "--processes", 2)
    make(source, tmp_path / "out", *options)
    seen = {}
    for folder in (tmp_path / "out", tmp_path / "out" / "held_out"):
        for path in sorted(folder.glob("*.tar")):
            with tarfile.open(path) as archive:
                entries = {member.name: archive.extractfile(member).read() for member in archive}
            seen |= {entries[f"{key}.txt"]: entries[f"{key}.png"] for key in {name[:9] for name in entries}}
    assert seen == {members["txt"]: members["png"] for _, members in numbered(0, 20)}


def test_keys_of_tars_are_captions_and_kept_ones(tmp_path):
    rows = [
        (f"{number}", {"png": picture(number), "json": json.dumps({"long": f"number {number}", "n": number}).encode()})
        for number in range(3)
    ]
    write_shard(tmp_path / "in" / "0.tar", rows)
    make(tmp_path / "in", tmp_path / "out", "--caption", "long", "--keep", "n")
    with tarfile.open(tmp_path / "out" / "00000.tar") as archive:
        facts = [json.load(archive.extractfile(name)) for name in archive.getnames() if name.endswith("json")]
    assert sorted((entry["n"], entry["caption"]) for entry in facts) == [(n, f"number {n}") for n in range(3)]
    with pytest.raises(ConfigError, match="--image is for a table, and .* is shards"):
        make(tmp_path / "in", tmp_path / "other", "--image", "png")


def test_damaged_shards_and_shards_without_a_sample_are_errors(tmp_path):
    write_numbered(tmp_path / "in", [10, 10])
    shard = tmp_path / "in" / "00001.tar"
    shard.write_bytes(shard.read_bytes()[:6000])
    message = r"more than 1%: 1 damaged shard.*00001\.tar: truncated.*, or remove them from \S+\.$"
    with pytest.raises(ConfigError, match=message):
        make(tmp_path / "in", tmp_path / "out")
    write_shard(tmp_path / "empty" / "0.tar", [])
    with pytest.raises(ConfigError, match="none of the shards holds a sample"):
        make(tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.partial").exists()


@pytest.mark.parametrize("form", ["parquet", "jsonl", "folder"])
def test_tables_are_indexed_for_training_looked_at_and_validated_on(form, tmp_path, capsys):
    folder = tmp_path / "in"
    source = pictures(folder, 20, (24, 20)) if form == "folder" else write_source(folder, form)
    for command in (["index", str(source), "--on", "local:1"], ["look", str(source), "--on", "local:1"]):
        options = commands._parser().parse_args(["shards", *command])
        options.run(options)
    output = capsys.readouterr().out
    assert "20 samples in " in output and "median 24" in output and "unusable samples   none" in output
    (index,) = [path for path in tmp_path.rglob("*.json") if path.parent.name == FOLDER]
    before = index.stat().st_mtime_ns
    data = opened(None, path=str(source))
    assert data.samples == 20 and index.stat().st_mtime_ns == before
    assert len(list(index.parent.glob("*.json"))) == 1
    pairs = open_validation(str(source), None, None)
    assert sorted(caption.strip() for caption in pairs.captions) == sorted(f"number {number}" for number in range(20))
    assert pairs.images[0].size == (24, 20)


def test_options_of_tables_are_refused_for_tars_and_a_missing_column_is_named(tmp_path):
    write_numbered(tmp_path / "in", [3])
    parse = commands._parser().parse_args
    options = parse(["shards", "index", str(tmp_path / "in"), "--image-key", "jpg"])
    with pytest.raises(ConfigError, match="--image-key is for tables"):
        options.run(options)
    source = write_source(tmp_path / "tables", "jsonl")
    options = parse(["shards", "index", str(source), "--image-key", "jpg"])
    with pytest.raises(ConfigError, match="has no column 'jpg'"):
        options.run(options)
