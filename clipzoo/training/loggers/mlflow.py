"""Logging to MLflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clipzoo import io
from clipzoo.runs.identity import flat
from clipzoo.training.loggers.base import MetricLogger
from clipzoo.training.loggers.extras import require_package

LONGEST_VALUE = 500
"""Characters of a parameter that every MLflow server takes."""


class MLflowLogger(MetricLogger):
    """Logs numbers, settings, final metrics and report pictures to MLflow; a resumed run continues its MLflow run.

    uri: URI of the server, or sqlite:///FILE (which needs all of mlflow); None for MLFLOW_TRACKING_URI.
    experiment: name of the experiment.
    """

    def __init__(self, uri: str | None, experiment: str) -> None:
        require_package("mlflow", "mlflow", "logger=mlflow")
        self._uri, self._experiment = uri, experiment

    def open(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        import mlflow

        self._client, stored = mlflow.MlflowClient(tracking_uri=self._uri), folder / "mlflow_run_id"
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
        if stored.exists():
            self._run = io.read_text(stored, io.MB)
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._client.create_run(experiment, run_name=folder.name).info.run_id
        io.write_whole(stored, self._run)
        for key, value in flat(dict(config)).items():
            self._client.log_param(self._run, key, str(value)[:LONGEST_VALUE])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=step)

    def report(self, metrics: Mapping[str, float], pictures: Sequence[Path]) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._run, f"final/{name}", value)
        for path in pictures:
            self._client.log_artifact(self._run, str(path), "report")

    def close(self) -> None:
        self._client.set_terminated(self._run)
