"""Evaluation datasets with damaged files: every file, cut, empty, random and of another type."""

from __future__ import annotations

import json
import shutil

import pytest

from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.readers import karpathy
from clipzoo.evaluation.datasets.tar import open_tar_dataset
from clipzoo.io import DamagedFileError
from tests.support import damage
from tests.support.evaluation_sets import write_sets


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    write_sets(folder)
    return folder


@pytest.mark.parametrize("kind", damage.KINDS)
@pytest.mark.parametrize("name", ["colours", "things"])
def test_every_damaged_file_of_a_dataset_is_named(sets, tmp_path, name, kind):
    shutil.copytree(sets / name, tmp_path / name)
    files = [path for path in sorted((tmp_path / name).rglob("*")) if path.is_file()]
    assert {path.suffix for path in files} == {".txt", ".json", ".tar"}
    for path in files:
        whole = path.read_bytes()
        kind(path)
        # Half of "1\n" is the same number.
        if path.read_bytes().strip() != whole.strip():
            with pytest.raises(ConfigError) as caught:
                open_tar_dataset(tmp_path, name)
            assert path.name in str(caught.value), f"{path}: {caught.value}"
        path.write_bytes(whole)
    open_tar_dataset(tmp_path, name)


@pytest.mark.parametrize(
    "content", [{"splits": [1]}, {"splits": {"test": 3}}, {"splits": {"test": {}}}, {"metric": ["top1"]}]
)
def test_a_meta_file_of_another_form_is_named(sets, tmp_path, content):
    shutil.copytree(sets / "colours", tmp_path / "colours")
    (tmp_path / "colours" / "meta.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="meta.json"):
        open_tar_dataset(tmp_path, "colours")


@pytest.mark.parametrize("content", ["", "[]", '{"images": [1]}', '{"images": [{"split": "test", "filename": "a"}]}'])
def test_a_damaged_list_of_captions_is_named(tmp_path, content):
    (tmp_path / "dataset_coco.json").write_text(content)
    with pytest.raises(DamagedFileError, match="dataset_coco.json .*: download it again"):
        karpathy(tmp_path, "test", 5)
