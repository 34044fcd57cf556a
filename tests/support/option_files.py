"""Hydra parses the files of conf/ again for every composition, and the suite composes a thousand times."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import IO, Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader

_load = OmegaConf.load


@cache
def _parsed(text: str) -> Any:
    return yaml.load(text, Loader=get_yaml_loader())


def parse_each_text_once() -> None:
    """Let OmegaConf, which copies what it is given, remember the values of each text that Hydra reads.

    This changes no configuration: faulty files are read by OmegaConf itself.
    """

    def load(file: str | Path | IO[str]) -> Any:
        if isinstance(file, str | Path):
            return _load(file)
        text = file.read()
        try:
            content = _parsed(text)
        except yaml.YAMLError:
            content = None
        if isinstance(content, dict):
            return OmegaConf.create(content)
        file.seek(0)
        return _load(file)

    OmegaConf.load = staticmethod(load)
