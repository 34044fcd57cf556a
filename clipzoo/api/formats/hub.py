"""Directories for the Hugging Face hub: weights, configuration, tokenizer, model card and picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clipzoo import io
from clipzoo.api.formats.card_results import PICTURE, retrieval_picture
from clipzoo.api.formats.model_card import model_card
from clipzoo.api.formats.preprocessing import tokenizer_faults, write_preprocessing
from clipzoo.api.formats.weights import save_weights
from clipzoo.api.loading import PAIR, LoadedModel
from clipzoo.api.published import CONFIG, HERE, HUB, VERSION, WEIGHTS, value_faults
from clipzoo.encoders.huggingface_tokenizer import HuggingFaceTokenizer
from clipzoo.errors import ConfigError
from clipzoo.runs.variables import uses_variables


def faults(model: LoadedModel) -> list[str]:
    """Return the reasons why nobody else could load the model."""
    nodes = {"encoder": model.config["encoder"], "head": model.config["head"]}
    if uses_variables(nodes):
        return ["its encoder or head refers to environment variables"]
    return list(value_faults(_nodes(model)))


def write_hub(model: LoadedModel, folder: Path, licence: str | None = None, data_licence: str | None = None) -> None:
    """Write the directory, which `clipzoo.load(folder)` reads; clipzoo.json is written last.

    licence, data_licence: of the model and of its training data, for the card.
    """
    save_weights(model.state_dict(), folder / WEIGHTS)
    if not tokenizer_faults(model):
        write_preprocessing(model, folder)
    if (picture := retrieval_picture(model.folder)) is not None:
        with io.whole(folder / PICTURE) as file:
            file.write(io.read_bytes(picture, 64 * io.MB))
    io.write_whole(folder / "README.md", model_card(model, licence, data_licence))
    content = {"version": VERSION, **_nodes(model), "interpolation": model.transform.interpolation}
    if model.transform.resize_mode != "shortest":
        content["resize_mode"] = model.transform.resize_mode
    if PAIR in model.config:
        content[PAIR] = model.config[PAIR]
    io.write_json(folder / CONFIG, content)


def _nodes(model: LoadedModel) -> dict[str, Any]:
    """Return the nodes of encoder and head as the directory states them."""
    nodes = {part: _without_sources(model.config[part]) for part in ("encoder", "head")}
    if isinstance(model.tokenizer, HuggingFaceTokenizer) and not tokenizer_faults(model):
        nodes["encoder"]["tokenizer"] = {**nodes["encoder"]["tokenizer"], "name": HERE}
    return nodes


def upload(folder: Path, repository: str) -> str:
    """Upload a directory to the hub as USER/NAME, made if it does not exist, and return its address.

    Raises:
        ConfigError: there is no token, or the hub refuses the upload.
    """
    from huggingface_hub import HfApi

    require_token()
    try:
        hub = HfApi()
        address = str(hub.create_repo(repository, exist_ok=True))
        hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload by clipzoo")
    # A refused name, token or connection ends in errors of many types.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        remedy = f"Upload the directory with: hf upload {repository} {folder}"
        raise ConfigError(f"{HUB}{repository}: the upload failed: {reason}. {remedy}") from error
    return address


def require_token() -> None:
    """Raise ConfigError unless the hub's client has a token."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise ConfigError("an upload needs a token of the Hugging Face hub: set HF_TOKEN, or run hf auth login")


def _without_sources(node: Any) -> Any:
    """Return a configuration whose towers are built without other weights: those of the directory replace them."""
    if isinstance(node, Mapping):
        return {key: _unloaded(key, value) for key, value in node.items()}
    return [_without_sources(value) for value in node] if isinstance(node, list | tuple) else node


def _unloaded(key: str, value: Any) -> Any:
    if key != "pretrained":
        return _without_sources(value)
    return False if isinstance(value, bool) else None
