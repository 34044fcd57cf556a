"""`clipzoo.export`: write a trained model in the format of another library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from clipzoo.api.formats import graphs, hub, onnx, open_clip, preprocessing, transformers
from clipzoo.api.loading import LoadedModel
from clipzoo.errors import ConfigError, installation, nearest
from clipzoo.io import below, new_folder


@dataclass(frozen=True)
class Format:
    """mark: a file that every export has, written last. faults: reasons why a model cannot be represented.

    write: writes the files to a folder. packages: modules that it imports; extra: the extra that installs them.
    """

    mark: str
    write: Callable[[LoadedModel, Path], None]
    faults: Callable[[LoadedModel], list[str]] = lambda model: []
    packages: tuple[str, ...] = ("tokenizers",)
    extra: str = "hf"


def _with_preprocessing(write: Callable[[LoadedModel, Path], None]) -> Callable[[LoadedModel, Path], None]:
    def write_both(model: LoadedModel, folder: Path) -> None:
        if not preprocessing.tokenizer_faults(model):
            preprocessing.write_preprocessing(model, folder)
        write(model, folder)

    return write_both


ONNX = ("tokenizers", "onnx", "onnxscript", "onnxruntime")
FORMATS = {
    "open_clip": Format("open_clip_config.json", open_clip.write_open_clip, open_clip.faults, ()),
    "transformers": Format("config.json", transformers.write_transformers, transformers.faults),
    "hub": Format("clipzoo.json", hub.write_hub, hub.faults),
    "torch": Format("score.pt2", _with_preprocessing(graphs.write_torch)),
    "onnx": Format("score.onnx", _with_preprocessing(onnx.write_onnx), packages=ONNX, extra="onnx"),
}


def export(
    model: LoadedModel,
    folder: str | Path,
    to: str = "open_clip",
    licence: str | None = None,
    data_licence: str | None = None,
) -> None:
    """Write a model to a folder in the format `to`.

    open_clip: for `open_clip.create_model("local-dir:FOLDER")`. transformers: for `CLIPModel.from_pretrained`, with
    processor and tokenizer. torch: programs of torch.export. onnx: graphs for onnxruntime. These two hold every head as
    three graphs, see `clipzoo.api.formats.graphs`. hub: a directory with a model card for `clipzoo.load`, here or on
    the Hugging Face hub; `licence` and `data_licence` are those of the model and of its training data, for the card.

    Raises:
        ConfigError: the format cannot represent the model, or the folder has files. Nothing is written then.
    """
    require(model, folder, to)
    with new_folder(Path(folder)) as new:
        if to == "hub":
            hub.write_hub(model, new, licence, data_licence)
        else:
            FORMATS[to].write(model, new)


def require(model: LoadedModel, folder: str | Path, to: str) -> None:
    """Raise ConfigError unless `export` can write the model."""
    if to not in FORMATS:
        raise ConfigError(f"to={to} is not a format ({', '.join(FORMATS)}){nearest(to, list(FORMATS))}")
    if reasons := FORMATS[to].faults(model):
        raise ConfigError(f"{to} cannot represent this model: {'; '.join(reasons)}")
    if missing := [name for name in FORMATS[to].packages if find_spec(name) is None]:
        raise ConfigError(f"{to} needs {', '.join(missing)}: {installation(FORMATS[to].extra)}")
    if (below(Path(folder), FORMATS[to].mark)).exists():
        raise ConfigError(f"{folder} already contains an exported model: choose another folder")
    if Path(folder).is_dir() and any(Path(folder).iterdir()):
        raise ConfigError(f"{folder} has files already: choose an empty folder, or one that does not exist")
