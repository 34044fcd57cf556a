"""clipzoo: contrastive image-text pretraining with any encoder, similarity head and objective.

model = clipzoo.load("runs/demo")
image = model.encode_image(model.transform(picture).unsqueeze(0))
text = model.encode_text(model.tokenizer(["a red circle"]))
model.similarity(image, text)
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "Batch": "clipzoo.types",
    "ConfigError": "clipzoo.errors",
    "Encoder": "clipzoo.encoders.base",
    "Features": "clipzoo.types",
    "InMemoryDataset": "clipzoo.data.in_memory",
    "LoadedModel": "clipzoo.loading",
    "Loss": "clipzoo.types",
    "Model": "clipzoo.model",
    "PointSet": "clipzoo.types",
    "Progress": "clipzoo.types",
    "Scores": "clipzoo.types",
    "SearchIndex": "clipzoo.explore.index",
    "Similarity": "clipzoo.types",
    "World": "clipzoo.distributed.world",
    "build_index": "clipzoo.explore.index",
    "concatenate": "clipzoo.types",
    "export": "clipzoo.exports.hub",
    "from_open_clip": "clipzoo.exports.open_clip",
    "from_transformers": "clipzoo.exports.transformers",
    "interpolate": "clipzoo.loading",
    "load": "clipzoo.exports.hub",
    "mteb": "clipzoo.loading",
    "save_adapters": "clipzoo.exports.adapters",
    "train": "clipzoo.training.train",
}
"""Public name -> its module; `__init__.pyi` lists the same names for type checkers."""
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: `import clipzoo` must not take torch's two seconds."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name == "__version__":
        return import_module("importlib.metadata").version("clipzoo")
    raise AttributeError(f"module clipzoo has no attribute {name}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
