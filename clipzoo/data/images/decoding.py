"""Encoded images to 8-bit RGB pixels.

JPEGs are decoded by simplejpeg if it is installed (the extra "fast"): the same libjpeg-turbo as in PIL, so the same
pixels, in half the time. PIL decodes everything else, and the JPEGs that simplejpeg refuses.
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

from clipzoo.data.faults import BadSampleError

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

Pixels = NDArray[np.uint8]
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_STRIP = 1 << 20
"""Number of pixels that are converted at a time."""
_JPEG = b"\xff\xd8\xff"
_PLAIN_JPEGS = ("YCbCr", "Gray")


class EncodedImage(Protocol):
    """An image of which only the header has been read.

    scalable: True if it can be decoded at 1/2, 1/4 or 1/8 of its size. conversions: kinds of conversion to RGB that
    are counted (CMYK, palette, 16 bits, transparency, animation); empty for a plain RGB or grey image.
    """

    height: int
    width: int
    scalable: bool
    conversions: list[str]

    def decode(self, reduction: int) -> Pixels:
        """Return pixels [ceil(height / reduction), ceil(width / reduction), 3], once. Raises BadSampleError."""


def read_header(encoded: bytes, max_pixels: int) -> EncodedImage:
    """Read the header of an image. Raises BadSampleError if it is no image or states more than `max_pixels`."""
    if not encoded:
        raise BadSampleError("empty_image", "the image has no bytes")
    image = _open_with_simplejpeg(encoded) or _PilImage(encoded)
    if image.height * image.width > max_pixels:
        size = f"{image.width} x {image.height} pixels"
        raise BadSampleError("enormous_image", f"{size}, more than data.max_pixels {max_pixels}")
    return image


def _open_with_simplejpeg(encoded: bytes) -> EncodedImage | None:
    if simplejpeg is None or not encoded.startswith(_JPEG):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(encoded)
    except ValueError:
        return None
    return _SimpleJpegImage(encoded, height, width) if colours in _PLAIN_JPEGS else None


class _SimpleJpegImage:
    scalable = True

    def __init__(self, encoded: bytes, height: int, width: int) -> None:
        self._encoded, self.height, self.width = encoded, height, width
        self.conversions: list[str] = []

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
            plain = self._image.mode in ("RGB", "L") and self.scalable
            self.conversions = [] if plain else _conversions(self._image)

    def decode(self, reduction: int) -> Pixels:
        with _pil_errors():
            if reduction > 1:
                self._image.draft(None, (self.width // reduction, self.height // reduction))
            self._image.load()
            pixels = _rgb_pixels(self._image)
            self._image.close()
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
        # Damaged bytes raise OSError, SyntaxError, ValueError, struct.error, EOFError, MemoryError and others.
        except Exception as error:
            raise BadSampleError("undecodable_image", f"{type(error).__name__}: {error}") from error


def _conversions(image: Image.Image) -> list[str]:
    checks = {
        "cmyk_image": image.mode == "CMYK",
        "palette_image": image.mode in ("P", "PA"),
        "16_bit_image": image.mode.startswith("I"),
        "transparent_image": image.has_transparency_data,
        # Counting the frames would decode all of them.
        "animated_image": image.format != "JPEG" and getattr(image, "is_animated", False),
    }
    return [kind for kind, applies in checks.items() if applies]


def _rgb_pixels(image: Image.Image) -> Pixels:
    """[H, W, 3]. Converted in strips: copies of a large image in other modes would take many times its memory."""
    rows = max(1, _STRIP // image.width)
    if rows >= image.height:
        return np.array(_to_rgb(image))
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top in range(0, image.height, rows):
        end = min(top + rows, image.height)
        pixels[top:end] = np.asarray(_to_rgb(image.crop((0, top, image.width, end))))
    return pixels


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert the first frame to RGB: transparency over white, the upper 8 of 16 bits, other modes as PIL does."""
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
