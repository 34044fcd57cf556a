"""clipzoo: contrastive image-text pretraining with any encoder, similarity head and objective.

model = clipzoo.load("runs/demo")
image = model.encode_image(model.transform(picture).unsqueeze(0))
text = model.encode_text(model.tokenizer(["a red circle"]))
model.similarity(image, text)
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["export", "from_open_clip", "load"]


def __getattr__(name: str) -> Any:
    """The library's functions, imported at first use: `import clipzoo` must not cost torch's two seconds."""
    if name in __all__:
        from clipzoo import api as library

        return getattr(library, name)
    raise AttributeError(f"module clipzoo has no attribute {name}")
