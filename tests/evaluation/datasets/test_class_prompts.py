"""Shards of class prompts, as training reads them."""

from __future__ import annotations

import pytest
import torch

from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.prompts import CAPTION_KEY, write_class_prompts
from tests.support.evaluation_sets import TEMPLATES, classes
from tests.support.shards import opened


def test_a_captions_prompt_changes_between_epochs_and_names_the_class_of_its_image(tmp_path):
    source = classes()
    assert write_class_prompts(source, "train", tmp_path / "shards", samples_a_shard=16) == 42
    assert len(list((tmp_path / "shards").glob("*.tar"))) == 3
    data = opened(tmp_path / "shards", tmp_path, caption_key=CAPTION_KEY)
    reader = data._reader(seed=0)
    seen = set()
    for sample_id in range(42):
        captions = {reader.read(sample_id, epoch).caption for epoch in range(6)}
        names = {name for name in source.class_names for caption in captions if name in caption}
        assert len(names) == 1 and captions <= {template.replace("{c}", *names) for template in TEMPLATES}
        seen |= captions
    assert len(seen) > 2 * len(source.class_names)
    image = reader.read(0, 0).image
    assert image.dtype == torch.uint8


def test_a_split_that_a_dataset_lacks_and_a_folder_with_shards_are_named(tmp_path):
    with pytest.raises(ConfigError, match="colours has no split val; it has train, test"):
        write_class_prompts(classes(), "val", tmp_path, samples_a_shard=16)
    (tmp_path / "00000.tar").touch()
    with pytest.raises(ConfigError, match="has files already"):
        write_class_prompts(classes(), "train", tmp_path, samples_a_shard=16)
