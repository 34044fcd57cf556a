"""Settings for the whole suite, and the shards that many tests read."""

import pytest
import torch
import webdataset

from tests.support.shards import picture

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Pattern of four shards of different sizes with 100 small JPEGs and captions in all, for data.shards."""
    folder = tmp_path_factory.mktemp("shards")
    number = 0
    for shard, count in enumerate((30, 26, 24, 20)):
        with webdataset.TarWriter(str(folder / f"{shard:05d}.tar")) as writer:
            for _ in range(count):
                caption = f"a {('red', 'green', 'blue')[number % 3]} picture, number {number}"
                image = picture(number, (40, 36), "JPEG")
                writer.write({"__key__": f"{number:06d}", "jpg": image, "txt": caption})
                number += 1
    return str(folder / "{00000..00003}.tar")
