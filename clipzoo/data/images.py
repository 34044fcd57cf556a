"""Images: encoded bytes to 8-bit RGB, and the random crop and augmentation of training. Imports torch only to compute.

The same conversion to RGB serves training, evaluation, inspection, reports and the library: the first frame of an
animation, transparency over white, the upper 8 of 16 bits, other modes as PIL converts them. The orientation in EXIF
metadata is not applied. JPEGs are decoded by simplejpeg if it is installed (the extra "fast"): the same libjpeg-turbo
as in PIL, so the same pixels, in half the time. PIL decodes everything else, and the JPEGs that simplejpeg refuses.
"""

from __future__ import annotations

import hashlib
import io
import math
import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from clipzoo.data.faults import BadSampleError
from clipzoo.io import DamagedFileError, read_bytes

try:
    import simplejpeg
except ImportError:
    simplejpeg = None
if TYPE_CHECKING:
    from torch import Tensor

Pixels = NDArray[np.uint8]
DECODING = "transparency over white, upper 8 of 16 bits"
"""Part of the key of cached results: change it together with the pixels that an image is decoded to."""
FORMATS = {
    "JPEG": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tif", "PPM": "ppm",
    "AVIF": "avif",
}  # fmt: skip
"""Formats that are read, by PIL's name, and their file extension."""
MAX_PIXELS = 89_000_000
"""The default of data.max_pixels."""
LARGEST_FILE = 2**28
"""Bytes of the largest encoded image that is read."""
OPERATIONS = (
    "identity", "autocontrast", "equalize", "brightness", "sharpness", "shear x", "shear y", "shift x", "shift y",
    "rotate",
)  # fmt: skip
"""Operations of RandAugment."""
_STRIP = 1 << 20
"""Number of pixels that are converted at a time."""
_ASPECT = (math.log(3 / 4), math.log(4 / 3))
_ATTEMPTS = 10
Region = tuple[float, float, float, float]
"""Left, top, right and bottom edge of a part of an image, in shares of its width and height."""
WHOLE: Region = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class ImageTransform:
    """Decode, crop, resize, flip and augment an image: bytes -> uint8 [3, S, S]. Arguments as in ShardDataset."""

    image_size: int
    crop_scale: tuple[float, float]
    interpolation: Literal["bicubic", "bilinear"]
    flip: float
    rand_augment: tuple[int, int] | None
    decode: Literal["exact", "fast"]
    max_pixels: int

    def __call__(
        self,
        encoded: bytes,
        random: np.random.Generator,
        stored_key: int | None = None,
        further: Sequence[tuple[np.random.Generator, Region]] = (),
    ) -> tuple[Tensor | None, list[str], int]:
        """Return the crop, the kinds of conversion that the image needed, and its key. Raises BadSampleError.

        The key is a digest of the encoded image and the place of the crop, never 0. An image whose key is `stored_key`
        is not decoded: its crop is None. stored_key: 0 decodes every image; None computes no digest, the key is 0.
        further: generators of further crops, which are inside these regions; the result is then [1 + c, 3, S, S].
        """
        import torch

        image = read_header(encoded, self.max_pixels)
        box, key = random_crop(image.height, image.width, self.crop_scale, random), 0
        if stored_key is not None:
            hashed = hashlib.blake2b(encoded, digest_size=8, key=repr(box).encode()).digest()
            key = int.from_bytes(hashed, "little", signed=True) or 1
            if key == stored_key:
                return None, image.conversions, key
        boxes, crops = [(box, random)], []
        for draw, (left, top, right, bottom) in further:
            rows, columns = (
                slice(min(int(first * size), size - 1), max(math.ceil(last * size), 1))
                for first, last, size in ((top, bottom, image.height), (left, right, image.width))
            )
            box = random_crop(rows.stop - rows.start, columns.stop - columns.start, self.crop_scale, draw)
            boxes.append((replace(box, top=box.top + rows.start, left=box.left + columns.start), draw))
        decode = cache(lambda reduction: EncodedImage(encoded).decode(reduction)) if further else image.decode
        for box, draw in boxes:
            reduction = 1
            if self.decode == "fast" and image.scalable:
                # The decoder may scale down as long as the crop keeps at least S pixels a side.
                shortest = min(box.height, box.width)
                reduction = next((factor for factor in (8, 4, 2) if shortest >= factor * self.image_size), 1)
            pixels = decode(reduction)
            # The crop starts on the grid of the reduced pixels; off the grid, its difference from the exactly decoded
            # crop would be several times larger.
            top, left, height, width = (edge // reduction for edge in (box.top, box.left, box.height, box.width))
            resized = torch.nn.functional.interpolate(
                torch.from_numpy(pixels[top : top + height, left : left + width]).permute(2, 0, 1)[None],
                (self.image_size, self.image_size),
                mode=self.interpolation,
                antialias=True,
                align_corners=False,
            )[0]
            if draw.random() < self.flip:
                resized = resized.flip(-1)
            if self.rand_augment is not None:
                resized = rand_augment(resized, *self.rand_augment, draw)
            crops.append(resized)
        return torch.stack(crops) if further else resized, image.conversions, key


@dataclass(frozen=True)
class Box:
    """A crop in pixels."""

    top: int
    left: int
    height: int
    width: int


def random_crop(height: int, width: int, scale: tuple[float, float], random: np.random.Generator) -> Box:
    """Return the box of a random resized crop: `scale` of the area, aspect ratio 3/4 to 4/3.

    If none of ten attempts fits, the box is the largest central crop within those aspect ratios. The number of random
    values drawn does not depend on the size of the image.

    Source: Szegedy et al. 2015, as implemented in torchvision.
    """
    areas = random.uniform(scale[0], scale[1], _ATTEMPTS) * height * width
    ratios = np.exp(random.uniform(*_ASPECT, _ATTEMPTS))
    place = random.random(2)
    for area, ratio in zip(areas, ratios, strict=True):
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(place[0] * (height - crop_height + 1))
            left = int(place[1] * (width - crop_width + 1))
            return Box(top, left, crop_height, crop_width)
    crop_width = min(width, max(1, round(height * math.exp(_ASPECT[1]))))
    crop_height = min(height, max(1, round(width / math.exp(_ASPECT[0]))))
    return Box((height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width)


def rand_augment(image: Tensor, operations: int, magnitude: int, random: np.random.Generator) -> Tensor:
    """Apply up to `operations` random operations to an image, uint8 [3, S, S] -> uint8 [3, S, S].

    They are drawn from OPERATIONS with replacement, each applied with probability 1/2, random sign and magnitude / 10.

    Source: RandAugment as in ALBEF and the vision-language code bases that follow it.
    """
    kinds = random.integers(len(OPERATIONS), size=operations)
    applied = random.random(operations) < 0.5
    signs = np.where(random.random(operations) < 0.5, 1.0, -1.0)
    for kind, chosen, sign in zip(kinds, applied, signs, strict=True):
        if chosen:
            image = apply_operation(image, OPERATIONS[kind], magnitude / 10, sign)
    return image


def apply_operation(image: Tensor, operation: str, level: float, sign: float) -> Tensor:
    """Apply one of OPERATIONS to an image, uint8 [3, S, S]. level: strength from 0 to 1. sign: direction, 1 or -1."""
    from torchvision.transforms.v2 import InterpolationMode, functional

    shear, shift, turn = [0.0, 0.0], [0.0, 0.0], 0.0
    match operation:
        case "identity":
            return image
        case "autocontrast":
            return functional.autocontrast(image)
        case "equalize":
            return functional.equalize(image)
        case "brightness":
            return functional.adjust_brightness(image, 0.1 + 1.8 * level)
        case "sharpness":
            return functional.adjust_sharpness(image, 0.1 + 1.8 * level)
        case "shear x" | "shear y":
            shear["xy".index(operation[-1])] = math.degrees(math.atan(sign * 0.3 * level))
        case "shift x" | "shift y":
            shift["xy".index(operation[-1])] = sign * 10 * level
        case "rotate":
            turn = sign * 30 * level
    bilinear, mid_grey = InterpolationMode.BILINEAR, [128.0, 128.0, 128.0]
    return functional.affine(image, turn, shift, 1.0, shear, interpolation=bilinear, fill=mid_grey)


def read_image_file(path: Path) -> bytes:
    """Return the bytes of an image file. Raises BadSampleError."""
    try:
        return read_bytes(path, LARGEST_FILE)
    except DamagedFileError as error:
        if not path.exists():
            raise BadSampleError("missing_file", "there is no such file") from None
        raise BadSampleError("unreadable_file", f"it {error.fault}") from None


def read_header(encoded: bytes, max_pixels: int | None) -> EncodedImage:
    """Read the header of an image. Raises BadSampleError for other files and above max_pixels (None: PIL's limit)."""
    image = EncodedImage(encoded)
    key, limit = "data.max_pixels", max_pixels
    if limit is None:
        key, limit = "2 * PIL.Image.MAX_IMAGE_PIXELS =", 2 * (Image.MAX_IMAGE_PIXELS or sys.maxsize)
    if image.height * image.width > limit:
        raise BadSampleError("enormous_image", f"{image.width} x {image.height} pixels, more than {key} {limit}")
    return image


def decode(encoded: bytes) -> Image.Image:
    """Return an image as a PIL image of mode RGB. Raises BadSampleError."""
    return Image.fromarray(read_header(encoded, None).decode(1))


def to_rgb(image: Image.Image) -> Image.Image:
    """Return the current frame of a PIL image in RGB. Raises BadSampleError for floats and integers beyond 16 bits."""
    if image.mode == "F":
        raise BadSampleError("undecodable_image", "floating-point pixels have no stated range")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise BadSampleError("undecodable_image", f"values {values.min()} to {values.max()} exceed 16 bits")
        upper = (values // 256).astype(np.uint8)
        # A grey value that represents transparency becomes white.
        if isinstance(transparent := image.info.get("transparency"), int):
            upper[values == transparent] = 255
        return Image.fromarray(upper).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


class EncodedImage:
    """An encoded image whose header has been read. Raises BadSampleError.

    extension: file extension of its format. scalable: True if it can be decoded at 1/2, 1/4 or 1/8 of its size.
    conversions: kinds of conversion to RGB that are counted; empty for a plain RGB or grey image.
    """

    height: int
    width: int
    extension = "jpg"
    scalable = True

    def __init__(self, encoded: bytes) -> None:
        if not encoded:
            raise BadSampleError("empty_image", "the image has no bytes")
        self._encoded = encoded
        self._image: Image.Image | None = None
        self.conversions: list[str] = []
        if simplejpeg is not None and encoded.startswith(b"\xff\xd8\xff"):
            with suppress(ValueError):
                self.height, self.width, colours, _ = simplejpeg.decode_jpeg_header(encoded)
                if colours in ("YCbCr", "Gray"):
                    return
        self._image = self._open()

    def _open(self) -> Image.Image:
        """Read the header with PIL."""
        with _pil_errors():
            image = Image.open(io.BytesIO(self._encoded), formats=list(FORMATS))
            self.width, self.height = image.size
            # A JPEG may hold further images, and is then of PIL's format MPO.
            self.extension = FORMATS.get(image.format or "", "jpg")
            self.scalable = image.format == "JPEG"
            checks = {
                "cmyk_image": image.mode == "CMYK", "palette_image": image.mode in ("P", "PA"),
                "16_bit_image": image.mode.startswith("I"), "transparent_image": image.has_transparency_data,
                # Counting the frames would decode all of them.
                "animated_image": image.format != "JPEG" and getattr(image, "is_animated", False),
            }  # fmt: skip
            self.conversions = [kind for kind, applies in checks.items() if applies]
            return image

    def decode(self, reduction: int) -> Pixels:
        """Return pixels [ceil(height / reduction), ceil(width / reduction), 3]; call once. Raises BadSampleError."""
        if self._image is None:
            height, width = -(-self.height // reduction), -(-self.width // reduction)
            with suppress(ValueError):
                return simplejpeg.decode_jpeg(self._encoded, min_height=height, min_width=width)
        with _pil_errors():
            image = self._image or self._open()
            # PIL does not test the checksums of a PNG's pixels.
            content, start = memoryview(self._encoded), 8
            while image.format == "PNG" and start + 12 <= len(content):
                end = start + 8 + int.from_bytes(content[start : start + 4], "big")
                checksum = content[end : end + 4]
                complete = content[start + 4 : start + 8] == b"IDAT" and len(checksum) == 4
                if complete and zlib.crc32(content[start + 4 : end]) != int.from_bytes(checksum, "big"):
                    raise BadSampleError("undecodable_image", f"the checksum of bytes {start} to {end} is wrong")
                start = end + 4
            if reduction > 1:
                image.draft(None, (self.width // reduction, self.height // reduction))
            image.load()
            # Converted in strips: copies of a large image in other modes would take many times its memory.
            width, height = image.size
            rows = max(1, _STRIP // width)
            if rows >= height:
                pixels = np.array(to_rgb(image))
            else:
                pixels = np.empty((height, width, 3), np.uint8)
                for top in range(0, height, rows):
                    end = min(top + rows, height)
                    pixels[top:end] = np.asarray(to_rgb(image.crop((0, top, width, end))))
            image.close()
            return pixels


@contextmanager
def _pil_errors() -> Iterator[None]:
    """Turn PIL's exceptions into BadSampleError and silence its warnings, mostly about damaged metadata."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except BadSampleError:
            raise
        except Image.DecompressionBombError as error:
            raise BadSampleError("enormous_image", str(error)) from error
        except UnidentifiedImageError as error:
            raise BadSampleError("undecodable_image", f"not an image that is read ({', '.join(FORMATS)})") from error
        # Damaged bytes raise OSError, SyntaxError, ValueError, struct.error, EOFError, MemoryError and others.
        except Exception as error:
            raise BadSampleError("undecodable_image", f"{type(error).__name__}: {error}") from error
