"""clipzoo: contrastive image-text pretraining with any encoder, similarity head and objective.

model = clipzoo.load("runs/demo")
image = model.encode_image(model.transform(picture).unsqueeze(0))
text = model.encode_text(model.tokenizer(["a red circle"]))
model.similarity(image, text)
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
_MODULES = {alias.name: node.module for node in _STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names}
"""Public name -> its module, from the list for type checkers."""
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
