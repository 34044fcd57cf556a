"""Image transform: decoding, crops and augmentation compared with PIL and torchvision."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, functional as torchvision

from clipzoo.data import images
from clipzoo.data.images import OPERATIONS, ImageTransform, apply_operation, rand_augment, random_crop, read_header
from clipzoo.data.plan import generator
from tests.support.processes import Process

MAX_PIXELS = 10**8


def photograph(width, height, quality=90, **options):
    """Return a JPEG with detail at every scale, like a photograph."""
    random = np.random.default_rng(width)
    pixels = np.zeros((height, width, 3))
    for octave in range(1, 8):
        grid = random.normal(size=(2**octave, 2**octave, 3)) / 1.6**octave
        channels = [Image.fromarray(grid[..., c].astype(np.float32)) for c in range(3)]
        pixels += np.stack([np.asarray(c.resize((width, height), Image.BICUBIC)) for c in channels], -1)
    pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()) * 255
    stream = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(stream, "JPEG", quality=quality, **options)
    return stream.getvalue()


def transform(size=64, **changes):
    plain = {"crop_scale": [0.5, 1.0], "interpolation": "bicubic", "flip": 0.0, "rand_augment": None, "decode": "exact"}
    return ImageTransform(image_size=size, max_pixels=MAX_PIXELS, **(plain | changes))


def random(index):
    return generator("augment", 0, 0, index)


def test_crops_have_the_distribution_of_torchvision():
    from torchvision.transforms import RandomResizedCrop

    torch.manual_seed(0)
    height, width, scale = 300, 400, [0.5, 1.0]
    actual = np.array([list(vars(random_crop(height, width, scale, random(i))).values()) for i in range(4000)])
    image = torch.empty(3, height, width)
    reference = np.array([RandomResizedCrop.get_params(image, scale, [3 / 4, 4 / 3]) for _ in range(4000)])
    spread = reference.std(0) / np.sqrt(4000 / 2)
    assert (np.abs(actual.mean(0) - reference.mean(0)) < 4 * spread).all()
    assert np.allclose(actual.std(0), reference.std(0), rtol=0.06)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 500), (500, 1), (30, 31), (100, 401), (401, 100)])
def test_crops_are_inside_the_image_and_have_the_requested_area_where_possible(height, width):
    for i in range(200):
        box = random_crop(height, width, [0.5, 1.0], random(i))
        assert box.top >= 0 and box.left >= 0 and box.height > 0 and box.width > 0
        assert box.top + box.height <= height and box.left + box.width <= width
        if abs(np.log(width / height)) < np.log(4 / 3):
            assert 0.45 * height * width < box.height * box.width


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_exact_pixels_are_those_of_pil_and_torchvision(interpolation):
    for i, (width, height) in enumerate([(400, 300), (90, 200), (64, 64), (513, 511)]):
        encoded = photograph(width, height)
        actual, conversions, _ = transform(interpolation=interpolation)(encoded, random(i))
        box = random_crop(height, width, [0.5, 1.0], random(i))
        image = Image.open(io.BytesIO(encoded)).convert("RGB")
        reference = torchvision.resized_crop(image, *vars(box).values(), [64, 64], InterpolationMode(interpolation))
        difference = np.abs(actual.permute(1, 2, 0).numpy().astype(int) - np.asarray(reference))
        # They differ only by rounding in fixed point.
        assert difference.max() <= 1 and difference.mean() < 0.25 and conversions == []


@pytest.mark.parametrize("reduction", [1, 2, 4, 8])
@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"progressive": True}, {"quality": 30}])
def test_simplejpeg_and_pil_decode_the_same_pixels(monkeypatch, reduction, options):
    pytest.importorskip("simplejpeg")
    for width, height in ((400, 300), (333, 251), (64, 65)):
        encoded = photograph(width, height, **options)
        fast = read_header(encoded, MAX_PIXELS)
        monkeypatch.setattr(images, "simplejpeg", None)
        slow = read_header(encoded, MAX_PIXELS)
        monkeypatch.undo()
        assert fast._image is None and slow._image is not None
        assert (fast.height, fast.width) == (slow.height, slow.width) == (height, width)
        assert np.array_equal(fast.decode(reduction), slow.decode(reduction))


@pytest.mark.parametrize(("width", "height", "size"), [(400, 300, 96), (512, 512, 224), (1024, 768, 224)])
def test_fast_decoding_is_close_to_exact_decoding_of_the_same_crop(width, height, size):
    encoded = photograph(width, height)
    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    for i in range(6):
        fast = transform(size, decode="fast")(encoded, random(i))[0]
        box = random_crop(height, width, [0.5, 1.0], random(i))
        reduction = max([r for r in (1, 2, 4, 8) if min(box.height, box.width) >= r * size])
        top, left, tall, wide = (edge // reduction * reduction for edge in vars(box).values())
        exact = torchvision.resized_crop(image, top, left, tall, wide, [size, size], InterpolationMode.BICUBIC)
        difference = np.abs(fast.permute(1, 2, 0).numpy().astype(int) - np.asarray(exact))
        assert difference.mean() < 2
    # Crops up to twice the size are decoded exactly.
    encoded = photograph(200, 180)
    for i in range(4):
        assert torch.equal(transform(128, decode="fast")(encoded, random(i))[0], transform(128)(encoded, random(i))[0])


def test_a_flip_reverses_the_columns_of_the_same_crop_and_pixels_do_not_depend_on_images_read_before():
    encoded = photograph(100, 80)
    for i in range(4):
        plain, mirrored = transform(flip=0.0)(encoded, random(i))[0], transform(flip=1.0)(encoded, random(i))[0]
        assert torch.equal(mirrored, plain.flip(-1))
    half, never = transform(flip=0.5), transform(flip=0.0)
    assert 70 < sum(torch.equal(half(encoded, random(i))[0], never(encoded, random(i))[0]) for i in range(200)) < 130
    augmented = transform(rand_augment=[2, 7], flip=0.5)
    alone = augmented(encoded, random(3))[0]
    torch.manual_seed(5)
    augmented(photograph(70, 90), random(1))
    assert torch.equal(augmented(encoded, random(3))[0], alone)


def test_rand_augment_applies_all_operations_equally_often_with_probability_one_half(monkeypatch):
    calls = []
    monkeypatch.setattr("clipzoo.data.images.apply_operation", lambda image, *call: calls.append(call) or image)
    image = torch.zeros(3, 4, 4, dtype=torch.uint8)
    for i in range(4000):
        rand_augment(image, 2, 7, random(i))
    kinds = np.bincount([OPERATIONS.index(kind) for kind, _, _ in calls], minlength=10)
    assert len(calls) == pytest.approx(4000, rel=0.06) and (np.abs(kinds - 400) < 90).all()
    assert {level for _, level, _ in calls} == {0.7}
    assert np.mean([sign > 0 for _, _, sign in calls]) == pytest.approx(0.5, abs=0.05)


def test_operations_keep_shape_and_type_and_match_their_names():
    image = torch.from_numpy(np.asarray(Image.open(io.BytesIO(photograph(64, 64)))).copy()).permute(2, 0, 1)
    identity, contrast, equal, bright, sharp, shear_x, shear_y, move_x, move_y, turn = (
        apply_operation(image, operation, 0.7, 1.0) for operation in OPERATIONS
    )
    assert torch.equal(identity, image)
    assert contrast.amax((1, 2)).min() >= 254 and contrast.amin((1, 2)).max() == 0
    assert equal.float().mean() == pytest.approx(127, abs=6)
    assert torch.allclose(bright.float(), (image * 1.36).clamp(0, 255).floor(), atol=1)
    assert sharp.float().var() > image.float().var()
    assert torch.equal(move_x[:, :, 7:], image[:, :, :-7]) and (move_x[:, :, :7] == 128).all()
    assert torch.equal(move_y[:, 7:], image[:, :-7])
    assert torch.equal(apply_operation(image, "shift x", 0.7, -1.0)[:, :, :-7], image[:, :, 7:])
    assert (shear_x[:, 0] != image[:, 0]).any() and (turn[:, 0, 0] == 128).all()
    assert (shear_y[:, 32, 32].int() - image[:, 32, 32].int()).abs().max() < 30
    for result in (contrast, equal, bright, sharp, shear_x, shear_y, move_x, move_y, turn):
        assert result.shape == image.shape and result.dtype == torch.uint8


def _peak_of_decoding(encoded: bytes) -> None:
    """Print by how many bytes decoding raises the peak memory of this process."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read_header(encoded, 10**9).decode(1)
    print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


@pytest.mark.medium
@pytest.mark.parametrize(("mode", "most"), [("RGBA", 9), ("RGB", 9), ("L", 6), ("P", 6), ("I;16", 7)])
def test_decoding_a_large_image_takes_a_small_multiple_of_its_pixels(mode, most, tmp_path):
    side = 5000
    stream = io.BytesIO()
    options = {"transparency": 0} if mode == "P" else {}
    Image.new(mode, (side, side)).save(stream, "PNG", **options)
    assert len(stream.getvalue()) < 200_000
    process = Process(_peak_of_decoding, stream.getvalue(), log=tmp_path / "log")
    assert process.wait() == 0, process.stderr
    assert int(process.stdout) / side**2 < most


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB", "CMYK", "I;16", "1"])
def test_strips_give_the_pixels_of_the_whole_image(mode, monkeypatch):
    random = np.random.default_rng(0)
    image = Image.fromarray(random.integers(0, 256, (37, 23, 4), dtype=np.uint8), "RGBA")
    if mode == "I;16":
        image = Image.fromarray(random.integers(0, 2**16, (37, 23), dtype=np.uint16))
    elif mode != "RGBA":
        image = image.convert("RGB").convert(mode) if mode in ("P", "CMYK", "1") else image.convert(mode)
    stream = io.BytesIO()
    image.save(stream, "TIFF" if mode == "CMYK" else "PNG", **({"transparency": 3} if mode == "P" else {}))
    whole = read_header(stream.getvalue(), 10**9).decode(1)
    monkeypatch.setattr(images, "_STRIP", 23 * 5)
    np.testing.assert_array_equal(read_header(stream.getvalue(), 10**9).decode(1), whole)


@pytest.mark.parametrize("decode", ["exact", "fast"])
@pytest.mark.parametrize("file_format", ["JPEG", "PNG"])
def test_further_crops_are_those_of_the_region_as_an_image_and_do_not_change_the_first(decode, file_format):
    pixels = Image.open(io.BytesIO(photograph(400, 320)))
    region = pixels.crop((100, 80, 300, 320))
    whole, part = io.BytesIO(), io.BytesIO()
    pixels.save(whole, file_format), region.save(part, "PNG")
    crop = transform(32, decode=decode, flip=0.5)
    further = [(random(1), (0.25, 0.25, 0.75, 1.0)), (random(2), images.WHOLE)]
    first, second, third = crop(whole.getvalue(), random(0), None, further)[0]
    assert torch.equal(first, crop(whole.getvalue(), random(0))[0])
    assert torch.equal(third, crop(whole.getvalue(), random(2))[0])
    expected = crop(part.getvalue(), random(1))[0]
    if file_format == "PNG":
        assert torch.equal(second, expected)
    else:
        assert (second.int() - expected.int()).abs().float().mean() < 6, "JPEG loses detail"
