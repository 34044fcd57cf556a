"""Encoded images to RGB pixels of 8 bits.

JPEGs go through simplejpeg where it is installed (the extra "fast"): the same libjpeg-turbo as PIL's, hence the same
pixels, in half the time. PIL has the last word on what it refuses.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from clipzoo.data.shards.faults import BadSampleError

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

Pixels = NDArray[np.uint8]
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_JPEG = b"\xff\xd8\xff"
_PLAIN_JPEGS = ("YCbCr", "Gray")


class EncodedImage(Protocol):
    """An image of which only the header has been read.

    scalable: whether it can be decoded at a half, quarter or eighth. notes: kinds for the counters, of images that
    are not plain RGB, grey or the like.
    """

    height: int
    width: int
    scalable: bool
    notes: list[str]

    def decode(self, reduction: int) -> Pixels:
        """[ceil(height / reduction), ceil(width / reduction), 3]. Raises BadSampleError."""


def read_header(encoded: bytes, max_pixels: int) -> EncodedImage:
    """Raises BadSampleError for what is no image, and for one that says it has more than `max_pixels`."""
    if not encoded:
        raise BadSampleError("empty_image", "the image has no bytes")
    image = _turbo(encoded) or _PilImage(encoded)
    if image.height * image.width > max_pixels:
        size = f"{image.width} x {image.height} pixels"
        raise BadSampleError("enormous_image", f"{size}, more than data.max_pixels {max_pixels}")
    return image


def _turbo(encoded: bytes) -> EncodedImage | None:
    if simplejpeg is None or not encoded.startswith(_JPEG):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(encoded)
    except ValueError:
        return None
    return _TurboImage(encoded, height, width) if colours in _PLAIN_JPEGS else None


class _TurboImage:
    scalable = True

    def __init__(self, encoded: bytes, height: int, width: int) -> None:
        self._encoded, self.height, self.width = encoded, height, width
        self.notes: list[str] = []

    def decode(self, reduction: int) -> Pixels:
        height, width = -(-self.height // reduction), -(-self.width // reduction)
        try:
            return simplejpeg.decode_jpeg(self._encoded, min_height=height, min_width=width)
        except ValueError:
            return _PilImage(self._encoded).decode(reduction)


class _PilImage:
    def __init__(self, encoded: bytes) -> None:
        with _pil_errors():
            self._image = Image.open(io.BytesIO(encoded), formats=_FORMATS)
            self.width, self.height = self._image.size
            self.scalable = self._image.format == "JPEG"
            self.notes = [] if self._image.mode in ("RGB", "L") and self.scalable else _notes(self._image)

    def decode(self, reduction: int) -> Pixels:
        with _pil_errors():
            if reduction > 1:
                self._image.draft(None, (self.width // reduction, self.height // reduction))
            return np.array(_to_rgb(self._image))


@contextmanager
def _pil_errors() -> Iterator[None]:
    """PIL's many exceptions as BadSampleError, without its warnings (of damaged metadata, above all)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except BadSampleError:
            raise
        except Image.DecompressionBombError as error:
            raise BadSampleError("enormous_image", str(error)) from error
        # Damaged bytes end in OSError, SyntaxError, ValueError, struct.error, EOFError, MemoryError and more.
        except Exception as error:
            raise BadSampleError("undecodable_image", f"{type(error).__name__}: {error}") from error


def _notes(image: Image.Image) -> list[str]:
    checks = {
        "cmyk_image": image.mode == "CMYK",
        "palette_image": image.mode in ("P", "PA"),
        "16_bit_image": image.mode.startswith("I"),
        "transparent_image": image.has_transparency_data,
        "animated_image": image.format != "JPEG" and getattr(image, "n_frames", 1) > 1,
    }
    return [kind for kind, holds in checks.items() if holds]


def _to_rgb(image: Image.Image) -> Image.Image:
    """Of the first frame: transparency over white, 16 bits by their upper 8, the rest by PIL's conversion."""
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise BadSampleError("undecodable_image", f"values {values.min()} to {values.max()} exceed 16 bits")
        return Image.fromarray((values // 256).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise BadSampleError("undecodable_image", "floating-point pixels have no stated range")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")
