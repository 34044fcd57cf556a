"""Image preprocessing of evaluations: open_clip's own transform is the judge."""

from __future__ import annotations

import json
import resource

import numpy as np
import open_clip
import pytest
import torch
from open_clip.transform import image_transform
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

import clipzoo
from clipzoo.encoders.open_clip import describe
from clipzoo.errors import ConfigError
from clipzoo.evaluation.encoder import Transform, keep_freed_memory
from tests.support.open_clip_models import small_model

SHAPES = ((60, 90), (91, 47), (32, 32), (20, 25), (200, 31))
"""Height and width of the images."""


def images() -> list[Image.Image]:
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 256, (*shape, 3), dtype=np.uint8)) for shape in SHAPES]


@pytest.mark.parametrize("resize", ["shortest", "squash", "longest"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_pixels_are_those_of_open_clip(resize, interpolation):
    ours = Transform(32, 32, interpolation, resize)
    theirs = image_transform(
        32, is_train=False, mean=(0.0,) * 3, std=(1.0,) * 3, resize_mode=resize, interpolation=interpolation
    )
    for image in images():
        assert torch.equal(ours(image), (255 * theirs(image)).round().to(torch.uint8))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_the_crop_after_a_larger_resize_is_torchvisions(interpolation):
    steps = v2.Compose([v2.Resize(37, InterpolationMode(interpolation)), v2.CenterCrop(32), v2.PILToTensor()])
    for image in images():
        assert torch.equal(Transform(32, 37, interpolation)(image), steps(image))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ViT-B-16-SigLIP", ("bicubic", "squash")),
        ("ViT-L-14-CLIPA", ("bilinear", "squash")),
        ("MobileCLIP-B", ("bilinear", "shortest")),
        ("ViT-B-32", ("bicubic", "shortest")),
    ],
)
def test_models_of_the_registry_have_the_resizing_of_their_weights(name, expected):
    described = describe(name)
    assert (described.interpolation, described.resize_mode) == expected


@pytest.mark.medium
def test_a_model_of_open_clip_and_its_export_have_the_preprocessing_of_the_model(tmp_path):
    name, peer = small_model("ViT-B-32", tmp_path)
    path = tmp_path / "model" / "open_clip_config.json"
    content = json.loads(path.read_text())
    content["preprocess_cfg"] |= {"resize_mode": "squash", "interpolation": "bilinear"}
    path.write_text(json.dumps(content))
    torch.save(peer.state_dict(), tmp_path / "model" / "open_clip_pytorch_model.bin")
    model = clipzoo.from_open_clip(name)
    clipzoo.export(model, tmp_path / "exported")
    encoder = model.encoder
    for place in (name, f"local-dir:{tmp_path / 'exported'}"):
        preprocess = open_clip.create_model_and_transforms(place)[2]
        for image in images():
            ours = model.transform(image) * encoder._scale + encoder._shift
            torch.testing.assert_close(ours, preprocess(image), rtol=0, atol=1e-5)
    content["preprocess_cfg"]["resize_mode"] = "stretch"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="resize_mode=stretch; supported are"):
        describe(f"local-dir:{path.parent}")


def test_a_batch_takes_the_memory_of_the_batch_before_it():
    keep_freed_memory()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(1 << 23)  # 8192 pages
    # A small object may take the place of a block, which is then new once more.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 5 * 8192
