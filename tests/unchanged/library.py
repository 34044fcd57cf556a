"""The public functions of `import clipzoo`, called in a process of its own: see `Checkout.load`."""

from __future__ import annotations

import dataclasses
import io
import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tests.unchanged import inputs, results


def outputs(run: str) -> dict[str, Any]:
    """Digests of preprocessing, embeddings and similarities of a run's model, and of its open_clip export."""
    import clipzoo

    model = clipzoo.load(run)
    pictures = [Image.open(io.BytesIO(inputs.picture(seed, seed % 7, (45, 38), "PNG"))) for seed in range(6)]
    images = torch.stack([model.transform(picture) for picture in pictures])
    tokens = model.tokenizer([inputs.caption(number) for number in range(6)])
    with torch.no_grad():
        image, text = model.encode_image(images), model.encode_text(tokens)
        similarity = model.similarity(image, text)
    return {
        "transform": results.tensor_digest(images),
        "tokens": results.tensor_digest(tokens),
        "image": _digests(image),
        "text": _digests(text),
        "similarity": results.tensor_digest(similarity),
        "weights": {name: results.tensor_digest(value) for name, value in model.state_dict().items()},
        "export": _exported(clipzoo, model),
    }


def _digests(embedding: Any) -> list[str]:
    """Of a tensor, or of the tensors of a point set in the order of its fields."""
    if isinstance(embedding, torch.Tensor):
        return [results.tensor_digest(embedding)]
    return [results.tensor_digest(getattr(embedding, field.name)) for field in dataclasses.fields(embedding)]


def _exported(clipzoo: Any, model: Any) -> Any:
    """The files of clipzoo.export, or the name of the error for a model that open_clip cannot hold."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            clipzoo.export(model, Path(folder) / "exported")
        except Exception as error:
            return type(error).__name__
        return results.evaluation(Path(folder) / "exported")
