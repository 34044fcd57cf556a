"""`clipzoo datasets make` from the command line."""

from __future__ import annotations

import pytest

from clipzoo.cli import __main__ as commands
from clipzoo.errors import ConfigError
from tests.support.shards import picture


def make(*words: object) -> None:
    options = commands._parser().parse_args(["datasets", "make", *map(str, words)])
    options.run(options)


def test_the_command_writes_a_dataset_and_prints_how_to_evaluate_it(tmp_path, capsys):
    for name in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "p.png").write_bytes(picture(0))
    (tmp_path / "in" / "test" / "a" / "p.svg").write_text("<svg/>")
    (tmp_path / "in" / "test" / "c").mkdir()
    out = tmp_path / "sets" / "letters"
    make(tmp_path / "in", out, "--template", "the letter {c}")
    assert capsys.readouterr().out.splitlines() == [
        f"{out}: 2 classes; images: train 2, test 2",
        "other files, which are not read: 1 .svg",
        f"{out}/left_out.tsv names each of them",
        "classes left out, without an image in test: c",
        f"evaluate with: eval=none eval.root={tmp_path}/sets eval.zero_shot=[letters] eval.linear_probe=[letters]",
    ]
    with pytest.raises(ConfigError, match="letters exists already: remove it to write the dataset again"):
        make(tmp_path / "in", out)


def test_a_table_of_captions_becomes_a_retrieval_dataset(tmp_path, capsys):
    (tmp_path / "p.png").write_bytes(picture(0))
    (tmp_path / "t.csv").write_text("file,text\np.png,one\np.png,two\n")
    make(tmp_path / "t.csv", tmp_path / "pairs", "--image", "file", "--caption", "text")
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
            make(*words)
