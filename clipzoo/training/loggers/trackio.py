"""Logging to Trackio, whose dashboard `trackio show` needs no account."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clipzoo.runs.identity import flat
from clipzoo.training.loggers.base import MetricLogger
from clipzoo.training.loggers.extras import require_package


class TrackioLogger(MetricLogger):
    """Logs numbers and settings to Trackio; a resumed run continues its Trackio run.

    project: name of the project in the dashboard.
    space_id: a space on the Hugging Face hub that shows it; None for this machine.
    """

    def __init__(self, project: str, space_id: str | None) -> None:
        require_package("trackio", "trackio", "logger=trackio")
        self._project, self._space_id = project, space_id

    def open(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        import trackio

        settings = {
            key: value for key, value in flat(dict(config)).items() if not key.rpartition(".")[2].startswith("_")
        }
        self._run = trackio.init(
            project=self._project, name=folder.name, space_id=self._space_id, config=settings, resume="allow"
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
