"""Tables and folders as datasets: the same batches as tars of the same pictures, and clear messages for broken ones."""

import csv
import json
import os

import pytest
import torch

from clipzoo.data.tables import formats
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from tests.support.range_server import range_server
from tests.support.ranks import run_ranks
from tests.support.runs import train, train_and_kill
from tests.support.shards import batches_of, numbered, shard_data, write_numbered

pa = pytest.importorskip("pyarrow")
COUNTS = [7, 1, 12, 5, 9, 6]
N = 8
STEPS = 11
FORMATS = ["csv", "tsv", "jsonl", "parquet", "parquet_paths", "arrow", "arrow_file", "huggingface"]


def pictures(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for key, members in numbered(0, sum(COUNTS)):
        (folder / f"{key}.png").write_bytes(members["png"])
    return folder


def write_table(path, form, samples):
    """Write samples as one file with the columns image (filepath in text tables), caption, width and uid."""
    import pyarrow.parquet as pq

    rows = [
        {"filepath": f"{key}.png", "caption": members["txt"].decode(), "width": number, "uid": key}
        for number, (key, members) in enumerate(samples)
    ]
    if form in ("csv", "tsv"):
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if form == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
        return
    if form == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return
    images = [{"bytes": members["png"], "path": None} for _, members in samples]
    columns = {name: [row[name] for row in rows] for name in ("caption", "width", "uid")}
    if form == "parquet_paths":
        pq.write_table(pa.table({"filepath": [row["filepath"] for row in rows], **columns}), path)
    elif form == "parquet":
        pq.write_table(pa.table({"image": images, **columns}), path, row_group_size=5)
    else:
        table = pa.table({"image": images, **columns})
        write = pa.ipc.new_file if form == "arrow_file" else pa.ipc.new_stream
        with write(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=4)


def write_tables(folder, form):
    folder.mkdir(parents=True, exist_ok=True)
    if form == "huggingface":
        datasets = pytest.importorskip("datasets")
        samples = numbered(0, sum(COUNTS))
        rows = {
            "image": [{"bytes": members["png"], "path": None} for _, members in samples],
            "text": [members["txt"].decode() for _, members in samples],
        }
        features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
        datasets.Dataset.from_dict(rows, features=features).save_to_disk(folder, num_shards=len(COUNTS))
        return folder
    first = 0
    for number, count in enumerate(COUNTS):
        extension = {"parquet_paths": "parquet", "arrow_file": "arrow"}.get(form, form)
        write_table(folder / f"{number:05d}.{extension}", form, numbered(first, count))
        first += count
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    write_numbered(folder / "tar", COUNTS)
    pictures(folder / "pictures")
    for form in FORMATS:
        write_tables(folder / form, form)
    return folder


def table_data(root, form, **changes):
    changes = {"image_folder": str(root / "pictures"), "cache_folder": str(root / "cache"), **changes}
    return shard_data(None, path=str(root / form), **changes)


def read(data, rank=0, ranks=1, start=0):
    """Return sample ids, images, texts and digests of captions of all steps, [steps, b, ...]."""
    data.open(None, World())
    batches = list(batches_of(data, STEPS, N, world=World(rank, ranks), start_step=start, trim_text=False))
    names = ("sample_id", "image", "text", "caption_key")
    return [torch.stack([getattr(batch, name) for batch in batches]) for name in names]


def equal(some, others):
    return all(map(torch.equal, some, others))


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "huggingface"])
def test_tables_give_the_batches_of_tars_with_the_same_pictures_and_ids(root, form):
    expected = read(shard_data(root / "tar", flip=0.5))
    assert equal(read(table_data(root, form, flip=0.5)), expected)
    assert equal(read(table_data(root, form, flip=0.5), start=4), [part[4:] for part in expected])


@pytest.mark.parametrize("form", ["parquet", "arrow", "csv"])
def test_tables_on_a_server_give_the_batches_of_local_ones(root, form, tmp_path):
    with range_server(root / form) as server:
        path = [f"{server.address}/{number:05d}.{form}" for number in range(len(COUNTS))]
        settings = {"index_folder": str(tmp_path / "index"), "cache_folder": str(tmp_path / "cache")}
        images = {"image_folder": str(root / "pictures")} if form == "csv" else {}
        assert equal(read(shard_data(None, path=path, **settings, **images)), read(table_data(root, form)))
        if form == "csv":
            with pytest.raises(ConfigError, match=r"http.*csv has paths of images.*give data\.image_folder"):
                shard_data(None, path=path, **settings | {"index_folder": str(tmp_path)}).open(None, World())


def test_a_parquet_file_of_many_row_groups_gives_the_batches_of_files_of_its_parts(root, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "_SHARD_ROWS", 15)
    write_table(tmp_path / "all.parquet", "parquet", numbered(0, sum(COUNTS)))
    (tmp_path / "parts").mkdir()
    for first, end in ((0, 10), (10, 25), (25, 40)):
        write_table(tmp_path / "parts" / f"{first:02d}.parquet", "parquet", numbered(first, end - first))
    whole = table_data(tmp_path, "all.parquet", where="uid != '000007'", workers=2)
    assert equal(read(whole), read(table_data(tmp_path, "parts", where="uid != '000007'")))
    names = [(name, count) for name, _, count in whole.shards()]
    assert names == [("all#groups0-2.parquet", 9), ("all#groups2-5.parquet", 15), ("all#groups5-8.parquet", 15)]


def test_huggingface_datasets_on_disk_are_read_in_the_order_of_their_files(root):
    datasets = pytest.importorskip("datasets")
    data = table_data(root, "huggingface")
    data.open(None, World())
    stored = datasets.load_from_disk(root / "huggingface")
    assert [data.whole([number])[0][1] for number in (0, 7, 39)] == [[stored[number]["text"]] for number in (0, 7, 39)]
    sizes = [len(stored.shard(len(COUNTS), number, contiguous=True)) for number in range(len(COUNTS))]
    assert [count for _, _, count in data.shards()] == sizes


@pytest.mark.medium
@pytest.mark.parametrize("form", ["csv", "parquet", "arrow"])
def test_ranks_and_workers_share_the_batches_of_one_process(root, form):
    expected = read(table_data(root, form))
    for ranks in (1, 2):
        for workers in (0, 1, 4):
            parts = [read(table_data(root, form, workers=workers), rank, ranks) for rank in range(ranks)]
            assert equal([torch.cat(views, 1) for views in zip(*parts, strict=True)], expected), (ranks, workers)


def _ids_of_rank(root):
    world = World.from_process_group()
    data = table_data(root, "parquet", workers=1)
    data.open(None, world)
    return [batch.sample_id.tolist() for batch in batches_of(data, 3, N, world=world)]


@pytest.mark.medium
def test_two_processes_open_one_dataset_and_read_their_rows(root):
    halves = run_ranks(2, _ids_of_rank, root)
    whole = read(table_data(root, "parquet"))[0][:3].tolist()
    assert [first + second for first, second in zip(*halves, strict=True)] == whole


def test_a_folder_of_images_is_read_with_the_texts_beside(tmp_path):
    for number, (key, members) in enumerate(numbered(0, 12)):
        folder = tmp_path / "mine" / f"album{number // 4}"
        folder.mkdir(parents=True, exist_ok=True)
        for extension, content in members.items():
            (folder / f"{key}.{extension}").write_bytes(content)
    write_numbered(tmp_path / "tar", [12])
    expected = read(shard_data(tmp_path / "tar"))
    cache = {"cache_folder": str(tmp_path / "cache")}
    assert equal(read(table_data(tmp_path, "mine", image_folder=None, **cache)), expected)
    assert equal(read(table_data(tmp_path, "mine", image_folder=None, caption_key="caption", **cache)), expected)


def test_a_small_cache_and_a_copy_that_is_deleted_change_nothing(root, tmp_path):
    expected = read(table_data(root, "parquet"))
    cache = {"cache_folder": str(tmp_path), "cache_gigabytes": 1e-6}
    assert equal(read(table_data(root, "parquet", **cache)), expected)


def test_the_index_of_a_table_is_stored_and_renewed_for_a_changed_file(tmp_path):
    pictures(tmp_path / "pictures")
    table = tmp_path / "pairs.csv"
    write_table(table, "csv", numbered(0, 10))
    first = table_data(tmp_path, "pairs.csv", cache_folder=str(tmp_path / "cache"))
    first.open(None, World())
    write_table(table, "csv", numbered(0, 12))
    second = table_data(tmp_path, "pairs.csv", cache_folder=str(tmp_path / "cache"))
    second.open(None, World())
    assert (first.samples, second.samples) == (10, 12) and first.fingerprint != second.fingerprint


def test_an_index_of_wids_names_its_tars(tmp_path):
    write_numbered(tmp_path / "tar", [4, 5])
    entries = [{"url": f"tar/{number:05d}.tar", "nsamples": 4 + number} for number in range(2)]
    (tmp_path / "index.json").write_text(json.dumps({"wids_version": 1, "shardlist": entries}))
    listed, direct = shard_data(tmp_path / "index.json"), shard_data(tmp_path / "tar")
    for data in (listed, direct):
        data.open(None, World())
    assert listed.fingerprint == direct.fingerprint


def broken(tmp_path, name, write, **changes):
    """Return the message for a table that `write(path)` writes."""
    pictures(tmp_path / "pictures")
    write(tmp_path / name)
    with pytest.raises(ConfigError) as caught:
        table_data(tmp_path, name, cache_folder=str(tmp_path / "cache"), **changes).open(None, World())
    return str(caught.value)


def test_broken_tables_are_one_message_before_training(tmp_path):
    def csv_table(path):
        write_table(path, "csv", numbered(0, 8))

    def torn(form):
        def write(path):
            write_table(path, form, numbered(0, 8))
            os.truncate(path, path.stat().st_size - 100)

        return write

    assert "has no column 'title' (data.caption_key), but: filepath, caption" in broken(
        tmp_path, "wrong.csv", csv_table, caption_key="title"
    )
    assert "has no column 'img' (data.image_key)" in broken(tmp_path, "wrong.csv", csv_table, image_key="img")
    assert "none of the shards holds a sample" in broken(tmp_path, "torn.parquet", torn("parquet"))
    assert "truncated: no end-of-stream mark" in broken(tmp_path, "torn.arrow", torn("arrow"))
    assert "empty.csv: empty" in broken(tmp_path, "empty.csv", lambda path: path.write_bytes(b""))
    assert "has no rows" in broken(tmp_path, "header.csv", lambda path: path.write_text("image,caption\n"))
    assert "none.csv: missing" in broken(tmp_path, "none.csv", lambda path: None)
    assert "images that were looked for can be read" in broken(
        tmp_path, "moved.csv", csv_table, image_folder="/nowhere"
    )
    assert "has no column with a usual name (data.image_key), but: a, b" in broken(
        tmp_path, "odd.csv", lambda path: path.write_text("a,b\n1,2\n")
    )
    assert "does not tell its format" in broken(tmp_path, "odd.txt", csv_table)
    assert "none of its first rows is a JSON object" in broken(
        tmp_path, "a.jsonl", lambda path: path.write_text("{\n{")
    )
    urls = "image,caption\nhttps://example.org/1.jpg,one\n"
    said = "https://example.org/1.jpg is not a file: download the images, as img2dataset does"
    assert said in broken(tmp_path, "urls.csv", lambda path: path.write_text(urls))
    ragged = "image,caption\n000001.png,one\n000002.png\n"
    assert "Expected 2 columns, got 1" in broken(tmp_path, "ragged.csv", lambda path: path.write_text(ragged))


def test_images_that_are_missing_only_in_training_are_one_message_with_the_keys_of_tables(tmp_path):
    (tmp_path / "pairs").mkdir()
    pictures(tmp_path / "pairs")
    write_table(tmp_path / "pairs" / "pairs.csv", "csv", numbered(0, 20))
    data = table_data(tmp_path, "pairs/pairs.csv", image_folder=None, cache_folder=str(tmp_path / "cache"))
    data.open(None, World())
    for path in (tmp_path / "pairs").glob("*.png"):
        path.unlink()
    with pytest.raises(ConfigError, match="no such file.*check data.path, data.image_key, data.image_folder"):
        list(batches_of(data, 1, 4))


def test_missing_images_and_broken_rows_are_counted_samples(tmp_path):
    pictures(tmp_path / "pictures")
    rows = [
        {"image": f"{number:06d}.png", "caption": f"number {number}", "uid": number // 2 * 2} for number in range(20)
    ]
    rows[4]["image"], rows[6]["image"], rows[9]["caption"] = "gone.png", "../pictures/000001.png", "..."
    lines = [json.dumps(row) for row in rows]
    lines[11] = "{"
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    data = table_data(tmp_path, "rows.jsonl", max_bad_fraction=0.5, cache_folder=str(tmp_path / "cache"))
    data.open(None, World())
    ids = torch.cat([batch.sample_id for batch in batches_of(data, 5, 4)])
    assert sorted(ids.tolist()) == list(range(20))
    assert data.counters() == {
        "duplicate_keys": 1,
        "missing_file": 1,
        "unsafe_path": 1,
        "empty_caption": 1,
        "bad_json": 1,
    }


@pytest.mark.slow
def test_trainings_on_tars_and_tables_have_the_same_losses_also_when_resumed(tmp_path):
    counts = [40, 60]
    write_numbered(tmp_path / "tar", counts)
    (tmp_path / "parquet").mkdir()
    (tmp_path / "csv").mkdir()
    for key, members in numbered(0, 100):
        (tmp_path / "csv" / f"{key}.png").write_bytes(members["png"])
    for number, (first, count) in enumerate([(0, 40), (40, 60)]):
        for form in ("parquet", "csv"):
            write_table(tmp_path / form / f"{number}.{form}", form, numbered(first, count))
    every = ["data=table", "data.shards=null", f"data.cache_folder={tmp_path / 'c'}"]
    table, csv_table = ([*every, f"data.path={tmp_path / form}"] for form in ("parquet", "csv"))

    def losses(folder):
        lines = (tmp_path / folder / "run" / "metrics.jsonl").read_text().splitlines()
        return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]

    shards = str(tmp_path / "tar")
    train(shards, tmp_path / "a")
    train(shards, tmp_path / "b", *table)
    train_and_kill(shards, tmp_path / "c", 5, *table)
    assert "resuming from step" in train(shards, tmp_path / "c", *table, "data.workers=1")
    assert len(losses("a")) == 9 and losses("a") == losses("b") == losses("c")
    train(shards, tmp_path / "d", *csv_table, "data.workers=2", ranks=2)
    assert losses("d") == pytest.approx(losses("a"), rel=1e-10)
