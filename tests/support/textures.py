"""Pictures with the spectrum of photographs, and the copies of them that the web has."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def texture(seed: int, size: tuple[int, int] = (160, 120)) -> Image.Image:
    """Coloured noise whose amplitude falls with the frequency."""
    random = np.random.default_rng(seed)
    pixels = np.full((size[1], size[0], 3), 128.0)
    for cells in (2, 4, 8, 16, 32):
        noise = random.normal(0, 1, (cells, cells, 3)) * (2 / cells) ** 0.8
        channels = [Image.fromarray(noise[..., channel]).resize(size, Image.Resampling.BICUBIC) for channel in range(3)]
        pixels += 40 * np.stack([np.asarray(channel) for channel in channels], axis=-1)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def jpeg(image: Image.Image, quality: int = 92) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def copies(image: Image.Image, seed: int) -> dict[str, bytes]:
    """Return the image at lower JPEG qualities, in other sizes, and as small crops."""
    random, (width, height) = np.random.default_rng(seed), image.size
    scale = random.uniform(0.5, 0.9)
    found = {f"quality {quality}": jpeg(image, quality) for quality in (40, 75)}
    found["size"] = jpeg(image.resize((int(width * scale), int(height * scale))), 85)
    for share in (0.97, 0.95):
        kept = int(width * share), int(height * share)
        left, top = (int(random.integers(whole - part + 1)) for whole, part in zip(image.size, kept, strict=True))
        found[f"crop {share}"] = jpeg(image.crop((left, top, left + kept[0], top + kept[1])), 85)
    return found
