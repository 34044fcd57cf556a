"""Preprocessing as files of transformers: the tokenizer, and the resize, crop and normalisation of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clipzoo import io
from clipzoo.api.formats.tokenizers import tokenizer_files
from clipzoo.api.loading import LoadedModel
from clipzoo.errors import ConfigError


def image_settings(model: LoadedModel) -> dict[str, Any]:
    """Return the image processor of transformers with exactly the pixels of `LoadedModel.transform`.

    transformers' CLIPImageProcessor resizes tensors and rounds the central crop down; the one for timm's models uses
    torchvision's transforms of PIL images, as clipzoo and open_clip do.
    """
    size, encoder = model.encoder.image_size, model.config["encoder"]
    mode = {"shortest": "center", "squash": "squash"}.get(model.transform.resize_mode)
    if mode is None:
        raise ConfigError(f"transformers has no resize_mode={model.transform.resize_mode}: export to another format")
    transform = {
        "input_size": [3, size, size], "interpolation": model.transform.interpolation, "crop_pct": 1.0,
        "crop_mode": mode, "mean": list(encoder["mean"]), "std": list(encoder["std"]),
    }  # fmt: skip
    return {"image_processor_type": "TimmWrapperImageProcessor", "pretrained_cfg": transform}


def write_preprocessing(model: LoadedModel, folder: Path, processor: str | None = None) -> None:
    """Write the tokenizer's files and preprocessor_config.json. processor: class of transformers that joins both."""
    fast, settings = tokenizer_files(model.tokenizer)
    # A text tower that attends to padding takes no mask.
    settings["model_input_names"] = ["input_ids"] if model.encoder.needs_padding else ["input_ids", "attention_mask"]
    io.write_whole(folder / "tokenizer.json", fast.to_str())
    io.write_json(folder / "tokenizer_config.json", settings)
    named = {} if processor is None else {"processor_class": processor}
    io.write_json(folder / "preprocessor_config.json", {**named, **image_settings(model)})


def tokenizer_faults(model: LoadedModel) -> list[str]:
    """Return the reason why the tokenizer cannot be written."""
    try:
        tokenizer_files(model.tokenizer)
    except ConfigError as error:
        return [str(error)]
    return []
