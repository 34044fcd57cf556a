"""YAML files whose aliases stand for more than memory holds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from clipzoo.io import DamagedFileError, read_yaml
from clipzoo.report.pages import write_report
from clipzoo.runs.directory import config_of

LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
MERGED = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40))
BOMBS = {
    "aliases in lists": LAUGHS,
    "aliases in mappings": "a0: &a0 {x: y}\n"
    + "".join(f"a{n}: &a{n} {{p: *a{n - 1}, q: *a{n - 1}, r: *a{n - 1}}}\n" for n in range(1, 40)),
    "merged mappings": MERGED,
    "a node inside itself": "a: &a [*a, *a]\n",
    "a mapping inside itself": "a: &a {b: *a}\n",
    "a long text many times": f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 1000)}]\n",
    "brackets": "a: " + "[" * 20_000,
}


@pytest.mark.medium
@pytest.mark.parametrize("name", BOMBS)
def test_a_file_of_a_few_kilobytes_does_not_fill_the_memory(name, tmp_path):
    (tmp_path / "config.yaml").write_text(BOMBS[name])
    for read in (lambda: read_yaml(tmp_path / "config.yaml"), lambda: config_of(tmp_path)):
        begin = time.process_time()
        with pytest.raises(DamagedFileError, match="config.yaml is not YAML"):
            read()
        assert time.process_time() - begin < 10


def test_the_report_of_a_run_with_such_a_configuration_ends(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(LAUGHS)
    begin = time.process_time()
    try:
        write_report(tmp_path)
    except DamagedFileError as error:
        assert "more than 1,000,000" in str(error)
    assert time.process_time() - begin < 5


def test_ordinary_aliases_are_read(tmp_path):
    (tmp_path / "a.yaml").write_text(text := "a: &a {b: [1, 2.5, null]}\nc: *a\nd: {<<: *a, e: é}\n")
    assert read_yaml(tmp_path / "a.yaml") == yaml.safe_load(text)
