"""`clipzoo.load`: a trained model by its name, in every format that clipzoo reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from clipzoo.encoders.huggingface import stored_folder
from clipzoo.encoders.open_clip import FILE as OPEN_CLIP, FOLDER
from clipzoo.errors import ConfigError
from clipzoo.exports.open_clip import from_open_clip
from clipzoo.exports.transformers import from_transformers
from clipzoo.io.weights import from_hub
from clipzoo.loading import CONFIG, HUB, LoadedModel, load_published, load_run
from clipzoo.runs.remote import local_copy

MARKS = (CONFIG, OPEN_CLIP, "config.json")
"""Files of the formats of directories: of clipzoo, open_clip and transformers."""


def load(
    path: str | Path, device: str | torch.device = "cpu", trust: str | Sequence[str] = (), average: bool = False
) -> LoadedModel:
    """Load a trained model.

    path: a run directory (its newest valid checkpoint), one checkpoint of a run, or the URL of one of these in a store
        ("s3://bucket/runs/demo", as text); a directory of clipzoo (`clipzoo.export(..., to="hub")`), open_clip or
        transformers; "hf-hub:OWNER/MODEL", such a directory on the Hugging Face hub; "open_clip:NAME/TAG"; or
        "transformers:OWNER/MODEL". "@REVISION" may follow OWNER/MODEL.
    average: load the averaged weights of a run that was trained with `average=...`.

    The configuration may name parts of this package, and classes of the packages in `trust`: "mypackage".
    trust="oc.env" resolves its environment variables, ${oc.env:NAME}. Raises ConfigError if there is no such model,
    its configuration names code or an untrusted class, or it has no average.
    """
    name, trust = str(path), (trust,) if isinstance(trust, str) else trust
    library, _, place = name.partition(":")
    on_hub = name.startswith(HUB)
    if library == "transformers":
        model = from_transformers(place)
    elif library in ("open_clip", "local-dir"):
        place = name.removeprefix("open_clip:")
        if not {":", "/"} & {*place}:
            raise ConfigError(f"{name} names no weights: give open_clip:NAME/TAG or open_clip:local-dir:FOLDER")
        model = from_open_clip(place)
    else:
        folder = Path(place) if on_hub else local_copy(name, "path")
        if on_hub:
            with from_hub(place, f"{name} cannot be downloaded"):
                folder = stored_folder(place, list(MARKS))
                if (folder / CONFIG).exists():
                    folder = stored_folder(place, ["*.json", "*.safetensors"])
        mark = next((mark for mark in MARKS if (folder / mark).exists()), None)
        if mark is None or (folder / "config.yaml").exists():
            model = load_run(folder, trust, average)
        elif mark == CONFIG:
            model = load_published(folder, trust)
        elif mark == OPEN_CLIP:
            model = from_open_clip(name if on_hub else f"{FOLDER}{folder}")
        else:
            model = from_transformers(place if on_hub else folder)
    if average and not model.averaged:
        raise ConfigError(f"{name} holds one model and no average: export that of a run")
    return model.to(device).eval()
