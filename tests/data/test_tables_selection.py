"""Selected samples and drawn captions: counts as of pandas, frequencies, joins, and captions that are too long."""

import json

import numpy as np
import pandas
import pytest
import torch

from clipzoo.data.captions import fitted
from clipzoo.data.plan import generator
from clipzoo.data.tokenizer import ClipTokenizer
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from tests.support.shards import NumberTokenizer, batches_of, opened, picture, shard_data, write_shard

pa = pytest.importorskip("pyarrow")
COUNT = 60


def facts(number):
    return {
        "uid": f"{number * 7919:032x}", "width": number * 10 % 370,
        "similarity": None if number % 9 == 0 else number / 100, "caption": f"number {number}",
        "language": ["en", "de", "fr"][number % 3],
    }  # fmt: skip


def image(number):
    """Samples 50 .. 59 repeat the images of 0 .. 9."""
    return picture(number % 50)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The same samples as tars, CSV, JSONL, Parquet and Arrow, in two shards."""
    from pyarrow import csv, parquet

    folder = tmp_path_factory.mktemp("selection")
    (folder / "pictures").mkdir()
    for number in range(COUNT):
        (folder / "pictures" / f"{number}.png").write_bytes(image(number))
    for form in ("csv", "jsonl", "parquet", "arrow"):
        (folder / form).mkdir()
    for shard, numbers in enumerate((range(35), range(35, COUNT))):
        rows = [facts(number) for number in numbers]
        samples = [
            (row["uid"], {"png": image(number), "txt": row["caption"].encode(), "json": json.dumps(row).encode()})
            for number, row in zip(numbers, rows, strict=True)
        ]
        write_shard(folder / "tar" / f"{shard}.tar", samples)
        paths = [{**row, "filepath": f"{number}.png"} for number, row in zip(numbers, rows, strict=True)]
        csv.write_csv(pa.Table.from_pylist(paths), folder / "csv" / f"{shard}.csv")
        (folder / "jsonl" / f"{shard}.jsonl").write_text("\n".join(map(json.dumps, paths)))
        table = pa.Table.from_pylist([{**row, "image": image(n)} for n, row in zip(numbers, rows, strict=True)])
        parquet.write_table(table, folder / "parquet" / f"{shard}.parquet")
        with pa.ipc.new_stream(str(folder / "arrow" / f"{shard}.arrow"), table.schema) as writer:
            writer.write_table(table)
    return folder


FORMATS = ["tar", "csv", "jsonl", "parquet", "arrow"]


def selected(root, form, **changes):
    changes = {"cache_folder": str(root / "cache"), "tokenizer": NumberTokenizer(), **changes}
    if form == "tar":
        return opened(root / "tar", **changes)
    data = shard_data(None, path=str(root / form), image_folder=str(root / "pictures"), **changes)
    data.open(None, World())
    return data


def numbers_of(data):
    """Return the numbers of the samples in the order of their ids."""
    return [int(data.whole([sample])[0][1][0].split()[-1]) for sample in range(data.samples)]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("where", "query"),
    [
        ("width >= 200 and similarity > .28", None),
        ("language in ['en', 'de'] or not width > 100", None),
        ("width * 2 + 1 < 300 and language != 'fr' and uid != 'x'", None),
        ("\"similarity\" is null and caption like 'number _'", "similarity.isnull() and caption.str.len() == 8"),
    ],
)
def test_a_condition_selects_the_rows_that_pandas_selects(root, form, where, query):
    data = selected(root, form, where=where)
    expected = pandas.DataFrame([facts(number) for number in range(COUNT)]).query(query or where, engine="python")
    assert numbers_of(data) == list(expected.index) and 0 < data.samples < COUNT


def test_every_format_gives_the_same_batches_of_selected_samples(root):
    rows = {form: list(batches_of(selected(root, form, where="width >= 100", fraction=0.7), 4, 8)) for form in FORMATS}
    for batches in rows.values():
        for batch, other in zip(batches, rows["tar"], strict=True):
            assert torch.equal(batch.sample_id, other.sample_id) and torch.equal(batch.image, other.image)
            assert torch.equal(batch.text, other.text)


def test_fractions_are_exact_nested_and_set_by_the_seed(root):
    half, fifth = (set(numbers_of(selected(root, "tar", fraction=share))) for share in (0.5, 0.2))
    assert len(half) == COUNT // 2 and len(fifth) == COUNT // 5 and fifth < half
    assert set(numbers_of(selected(root, "tar", fraction=0.5, selection_seed=1))) != half


@pytest.mark.parametrize("form", ["tar", "parquet"])
def test_uid_lists_in_the_form_of_datacomp_and_as_text_select_their_samples(root, tmp_path, form):
    wanted = [3, 4, 40, 59]
    pairs = sorted((number * 7919 >> 64, number * 7919 & (2**64 - 1)) for number in [*wanted, 1000])
    np.save(tmp_path / "uids.npy", np.array(pairs, np.dtype("u8,u8")))
    (tmp_path / "uids.txt").write_text("\n".join(facts(number)["uid"] for number in wanted))
    for name in ("uids.npy", "uids.txt"):
        assert numbers_of(selected(root, form, uids=str(tmp_path / name))) == wanted
    np.save(tmp_path / "numbers.npy", np.arange(3.0))
    (tmp_path / "empty.txt").write_text("\n")
    messages = {"numbers.npy": "it holds float64", "empty.txt": "it holds no uid", "nowhere.npy": "is not a file"}
    for name, message in messages.items():
        with pytest.raises(ConfigError, match=f"data.uids=.*{message}"):
            selected(root, form, uids=str(tmp_path / name))


@pytest.mark.parametrize("form", ["tar", "parquet"])
def test_exact_duplicates_are_dropped_but_the_first(root, form, capsys):
    assert numbers_of(selected(root, form, duplicates="image")) == list(range(50))
    assert "50 of 60 samples are selected; left out: 10 by data.duplicates" in capsys.readouterr().err
    assert selected(root, form, duplicates="pair").samples == COUNT


def test_a_selection_is_part_of_the_dataset_and_is_stored(root, capsys):
    data = selected(root, "tar", where="width > 50")
    assert (
        len(
            {selected(root, "tar").fingerprint, data.fingerprint, selected(root, "tar", where="width > 60").fingerprint}
        )
        == 3
    )
    capsys.readouterr()
    assert selected(root, "tar", where="width > 50").fingerprint == data.fingerprint
    assert "samples are selected; left out: " in capsys.readouterr().err
    ids = torch.cat([batch.sample_id for batch in batches_of(data, data.samples, 8)])
    assert sorted(ids[: data.samples].tolist()) == list(range(data.samples))


def test_wrong_selections_are_one_message(root):
    with pytest.raises(ConfigError, match="no sample of 60 samples is selected: 60 by data.where"):
        selected(root, "csv", where="width > 10_000")
    with pytest.raises(ConfigError, match='column "widht" not found'):
        selected(root, "csv", where="widht > 1")
    with pytest.raises(ConfigError, match="cannot be applied"):
        selected(root, "parquet", where="language > 1")
    for where in ("width >", "1 = 1; drop table rows", "(select count(*) from read_csv('/etc/passwd')) > 0"):
        with pytest.raises(ConfigError, match="cannot be applied"):
            selected(root, "tar", where=where)


# Captions.


def test_captions_are_drawn_by_their_probabilities(tmp_path):
    rows = [
        {"uid": str(number), "caption": f"a {number}", "recaption": f"b {number}", "image": picture(1)}
        for number in range(8)
    ]
    pa.parquet = pytest.importorskip("pyarrow.parquet")
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    data = shard_data(
        None, path=str(tmp_path), caption_key={"caption": 0.3, "recaption": 0.7}, cache_folder=str(tmp_path / "c")
    )
    data.open(None, World())
    from clipzoo.data.captions import chosen

    sample = data._reader.sample(data._indexes[0], 0, 3)
    texts, shares = sample.captions({"caption": 0.3, "recaption": 0.7})
    draws = 100_000
    first = sum(
        chosen("caption", texts, 1, lambda _, draw=draw: generator("caption", 0, draw, 3), {}, shares)[0].startswith(
            "a"
        )
        for draw in range(draws)
    )
    assert abs(first - 0.3 * draws) < 3 * (draws * 0.3 * 0.7) ** 0.5


@pytest.mark.parametrize("form", ["tar", "csv", "jsonl", "parquet"])
def test_the_caption_without_a_key_stands_beside_captions_with_one(root, form):
    data = selected(root, form, caption_key=[".txt", "language", "uid"])
    assert data.whole([7])[0][1] == ["number 7", "de", facts(7)["uid"]]


@pytest.mark.parametrize("form", ["tar", "csv", "arrow"])
def test_captions_of_a_second_table_are_joined_by_uid(root, tmp_path, form):
    lines = [
        json.dumps({"uid": facts(number)["uid"], "recaption": f"new {1000 + number}"})
        for number in reversed(range(COUNT))
    ]
    (tmp_path / "recaptions.jsonl").write_text("\n".join(lines))
    joined = {"caption_table": str(tmp_path / "recaptions.jsonl"), "caption_key": "recaption"}
    data = selected(root, form, **joined)
    assert numbers_of(data) == list(range(1000, 1000 + COUNT))
    assert data.fingerprint != selected(root, form, caption_key="caption").fingerprint
    (tmp_path / "recaptions.jsonl").write_text("\n".join([*lines, lines[5]]))
    with pytest.raises(ConfigError, match="more than once"):
        selected(root, form, **joined)
    with pytest.raises(ConfigError, match="has no column of the caption keys short"):
        selected(root, form, **{**joined, "caption_key": "short"})


def test_long_captions_are_cut_by_the_rule_and_counted(tmp_path):
    tokenizer = ClipTokenizer(12)
    words = [f"w{number}" for number in range(40)]
    exact = "one two three four five six seven eight nine ten"
    assert len(tokenizer.encode(exact)) == 10
    for text, is_long in (
        (exact, False),
        (exact + " eleven", True),
        ("short", False),
        ("the " * 11, True),
        ("the " * 10, False),
    ):
        assert fitted(text, tokenizer, "truncate", np.random.default_rng(0)) == (text, is_long), text
    # encode() of the whole text is the oracle: every window fills the context and starts at a word.
    text = " ".join(words)
    starts = set()
    for seed in range(300):
        part, is_long = fitted(text, tokenizer, "window", np.random.default_rng(seed))
        assert is_long and text.endswith(part) and len(tokenizer.encode(part)) >= 10
        starts.add(part)
    fills = [first for first in range(40) if len(tokenizer.encode(" ".join(words[first:]))) >= 10]
    assert len(starts) == len(fills)
    sentences = ["A red cat sits.", "It looks at a dog.", "The dog sleeps.", "Both are small and very quiet today."]
    for seed in range(30):
        part, is_long = fitted(" ".join(sentences), tokenizer, "sentences", np.random.default_rng(seed))
        first = next(number for number, sentence in enumerate(sentences) if part.startswith(sentence))
        assert is_long and len(tokenizer.encode(part)) <= 10 and " ".join(sentences[first:]).startswith(part)


def test_long_captions_are_counted_samples(tmp_path):
    samples = [(str(n), {"png": picture(n), "txt": (f"word {n} " * (20 if n < 3 else 1)).encode()}) for n in range(12)]
    write_shard(tmp_path / "a.tar", samples)
    views = []
    for workers in (0, 2):
        data = opened(tmp_path, tokenizer=ClipTokenizer(8), long_captions="window", workers=workers)
        views.append(torch.cat([batch.text for batch in batches_of(data, 3, 4, trim_text=False)]))
        assert data.counters() == {"long_caption": 3}
    assert torch.equal(*views)
