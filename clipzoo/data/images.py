"""Encoded images to uint8 crops."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from clipzoo.data.augment import Box, rand_augment, random_crop
from clipzoo.data.health import BadSampleError

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


@dataclass(frozen=True)
class ImageReader:
    """Bytes -> [3, S, S] uint8, cropped, resized, flipped, augmented. Arguments as in ShardData."""

    image_size: int
    crop_scale: list[float]
    interpolation: Literal["bicubic", "bilinear"]
    flip: float
    rand_augment: list[int] | None
    decode: Literal["exact", "fast"]
    max_pixels: int

    def __call__(self, encoded: bytes, random: np.random.Generator) -> tuple[Tensor, list[str]]:
        """The crop, and what was done to make the image RGB of 8 bits (kinds for the counters). Raises BadSampleError."""
        if not encoded:
            raise BadSampleError("empty_image", "the image has no bytes")
        pixels, notes = self._crop(encoded, random)
        image = functional.interpolate(
            torch.from_numpy(pixels).permute(2, 0, 1)[None],
            (self.image_size, self.image_size),
            mode=self.interpolation,
            antialias=True,
            align_corners=False,
        )[0]
        if random.random() < self.flip:
            image = image.flip(-1)
        if self.rand_augment is not None:
            image = rand_augment(image, self.rand_augment[0], self.rand_augment[1], random)
        return image, notes

    def _crop(self, encoded: bytes, random: np.random.Generator) -> tuple[np.ndarray, list[str]]:
        """[h, w, 3] uint8, not yet resized."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                image = Image.open(io.BytesIO(encoded), formats=_FORMATS)
                width, height = image.size
                if width * height > self.max_pixels:
                    raise BadSampleError(
                        "enormous_image", f"{width} x {height} pixels, more than data.max_pixels {self.max_pixels}"
                    )
                box = random_crop(height, width, self.crop_scale, random)
                notes = _notes(image)
                if self.decode == "fast" and image.format == "JPEG":
                    need = max(self.image_size / box.width, self.image_size / box.height)
                    image.draft(None, (int(np.ceil(width * need)), int(np.ceil(height * need))))
                    box = _scaled(box, image.size[1] / height, image.size[0] / width, image.size)
                rgb = _to_rgb(image)
                edges = (box.left, box.top, box.left + box.width, box.top + box.height)
                return np.array(rgb.crop(edges)), notes
        except BadSampleError:
            raise
        except Image.DecompressionBombError as error:
            raise BadSampleError("enormous_image", str(error)) from error
        # Decoders fail in many ways on damaged bytes (OSError, SyntaxError, ValueError, struct.error, EOFError, ...).
        except Exception as error:
            raise BadSampleError("undecodable_image", f"{type(error).__name__}: {error}") from error


def _scaled(box: Box, vertical: float, horizontal: float, size: tuple[int, int]) -> Box:
    top, left = round(box.top * vertical), round(box.left * horizontal)
    height = max(1, min(round(box.height * vertical), size[1] - top))
    width = max(1, min(round(box.width * horizontal), size[0] - left))
    return Box(top, left, height, width)


def _notes(image: Image.Image) -> list[str]:
    notes = []
    if getattr(image, "n_frames", 1) > 1:
        notes.append("animated_image")
    if image.mode in ("CMYK", "P", "PA"):
        notes.append({"CMYK": "cmyk_image"}.get(image.mode, "palette_image"))
    if image.mode.startswith("I"):
        notes.append("16_bit_image")
    if image.has_transparency_data:
        notes.append("transparent_image")
    return notes


def _to_rgb(image: Image.Image) -> Image.Image:
    """Of the first frame: transparency over white, 16 bits by their upper 8, anything else by PIL's conversion."""
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise BadSampleError("undecodable_image", f"mode {image.mode} with values {values.min()} to {values.max()}")
        return Image.fromarray((values // 256).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise BadSampleError("undecodable_image", "floating-point pixels have no stated range")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")
