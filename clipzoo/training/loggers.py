"""Loggers: metrics.jsonl always; W&B, TensorBoard, MLflow, Trackio and custom ones on request."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
import uuid
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from clipzoo import io
from clipzoo.distributed import launch
from clipzoo.errors import ConfigError, installation, masked
from clipzoo.runs.identity import flat
from clipzoo.runs.record import LOG_BYTES, revision
from clipzoo.types import Part

log = logging.getLogger(__name__)

WANDB_TIMEOUTS = {"init_timeout": 60, "finish_timeout": 300}
"""Timeouts of W&B, in seconds."""


class MetricLogger(Part):
    """Receives the numbers of a training on the first rank; a subclass needs only `log`.

    An error of a logger is written to the log, and the training continues without the logger.
    """

    def open(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        """Start logging, or continue at `step` after a resume. folder: run directory, which has the name of the run."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of one step, or of an evaluation after it, by name."""

    def report(self, metrics: Mapping[str, float], pictures: Sequence[Path]) -> None:
        """Record the final metrics and the report's pictures."""

    def close(self) -> None:
        """Flush and close."""


class Logger(Part):
    """Writes metrics.jsonl, the source of truth, and copies to other loggers. Opened on the first rank only.

    also: additional loggers by name, of services or custom ones.
    """

    def __init__(self, also: dict[str, MetricLogger] | None = None) -> None:
        self._also = dict(also or {})
        self._open: dict[str, MetricLogger] = {}
        self._failed: set[str] = set()
        """Names of loggers that get no more steps, because their `log` has failed."""
        self._file: io.JsonLines | None = None

    def open(self, folder: Path | None, config: Mapping[str, Any], step: int) -> None:
        """Start logging to a run directory (None: nowhere) at `step`: later lines of a killed run are removed."""
        if folder is None:
            return
        path = folder / "metrics.jsonl"
        if path.exists():
            text = ""
            for row in io.read_json_lines(path, LOG_BYTES):
                number, event = row.get("step"), row.get("event")
                # A resumed run repeats the evaluation after its checkpoint.
                if isinstance(number, int) and (number < step or (number == step and event != "evaluation")):
                    text += f"{json.dumps(row)}\n"
            io.write_whole(path, text)
        self._file = io.JsonLines(path)
        for name, logger in self._also.items():
            if self._guarded(name, partial(logger.open, folder, {**config, "revision": revision()}, step)):
                self._open[name] = logger

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the values of one step. Raises WriteError if metrics.jsonl cannot be written."""
        if self._file is None:
            return
        self._file.append({"step": step, **values})
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
        for name, logger in self._open.items():
            if name not in self._failed and not self._guarded(name, partial(logger.log, step, numbers)):
                self._failed.add(name)

    def report(self, metrics: Mapping[str, float], pictures: Sequence[Path]) -> None:
        """Send the final metrics and the report's pictures to the other loggers."""
        for name, logger in self._open.items():
            self._guarded(name, partial(logger.report, metrics, pictures))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        for name, logger in self._open.items():
            self._guarded(name, logger.close)
        self._open.clear()
        self._failed.clear()

    def _guarded(self, name: str, action: Callable[[], None]) -> bool:
        """Run an action of the logger `name`, return True if it succeeds. A failure is logged; training continues."""
        try:
            action()
        except Exception as error:
            log.warning("logging continues without %s: %s: %s", name, type(error).__name__, error)
            return False
        return True


class WandbLogger(MetricLogger):
    """Logs numbers, settings, final metrics and report pictures to W&B; a resumed run continues its W&B run.

    mode: "online", "offline" (upload later with `wandb sync`) or "disabled". project, entity: names in W&B.
    group: name of the group in W&B, null for one group per sweep.
    """

    def __init__(
        self, mode: Literal["online", "offline", "disabled"], project: str, entity: str | None, group: str | None
    ) -> None:
        self._mode: Any = mode
        group = group or os.environ.get("CLIPZOO_SWEEP")
        self._names: dict[str, Any] = {"project": project, "entity": entity, "group": group}

    def open(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        import wandb

        settings = dir(wandb.Settings())  # older versions have fewer settings
        timeouts: dict[str, Any] = {name: value for name, value in WANDB_TIMEOUTS.items() if name in settings}
        path = folder / "wandb_id"
        if not path.exists():
            io.write_whole(path, uuid.uuid4().hex[:8])
        # W&B records the command line: passwords of URLs are masked.
        arguments, sys.argv = sys.argv, masked(sys.argv)
        try:
            self._run = wandb.init(
                id=io.read_text(path, io.MB), name=folder.name, resume="allow", mode=self._mode, dir=str(folder),
                config=dict(config), **self._names, settings=wandb.Settings(silent=True, **timeouts),
            )  # fmt: skip
        finally:
            sys.argv = arguments

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def report(self, metrics: Mapping[str, float], pictures: Sequence[Path]) -> None:
        import wandb

        table = wandb.Table(["metric", "value"], [[name, value] for name, value in metrics.items()])
        self._run.log({"metrics": table, **{f"report/{path.stem}": wandb.Image(str(path)) for path in pictures}})
        self._run.summary.update(dict(metrics))

    def close(self) -> None:
        self._run.finish()


class TensorBoardLogger(MetricLogger):
    """Writes numbers, final metrics and report pictures to the event files of TensorBoard in <run>/tensorboard."""

    def __init__(self) -> None:
        require_package("tensorboard")

    def open(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hides values that a killed run logged after its checkpoint.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def report(self, metrics: Mapping[str, float], pictures: Sequence[Path]) -> None:
        import numpy as np
        from PIL import Image

        lines = [f"| {name} | {value:.2f} |" for name, value in metrics.items()]
        self._writer.add_text("metrics", "\n".join(["| metric | value |", "| --- | ---: |", *lines]))
        for path in pictures:
            with Image.open(path) as picture:
                pixels = np.asarray(picture.convert("RGB"))
            self._writer.add_image(f"report/{path.stem}", pixels, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class MLflowLogger(MetricLogger):
    """Logs numbers, settings, final metrics and report pictures to MLflow; a resumed run continues its MLflow run.

    uri: URI of the server, or sqlite:///FILE (which needs the full mlflow package); None for MLFLOW_TRACKING_URI.
    experiment: name of the experiment.
    """

    def __init__(self, uri: str | None, experiment: str) -> None:
        require_package("mlflow")
        self._uri, self._experiment = uri, experiment

    def open(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        import mlflow

        self._client, id_file = mlflow.MlflowClient(tracking_uri=self._uri), folder / "mlflow_run_id"
        existing = self._client.get_experiment_by_name(self._experiment)
        experiment = existing.experiment_id if existing else self._client.create_experiment(self._experiment)
        if id_file.exists():
            self._run = io.read_text(id_file, io.MB)
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._client.create_run(experiment, run_name=folder.name).info.run_id
        io.write_whole(id_file, self._run)
        for key, value in flat(dict(config)).items():
            self._client.log_param(self._run, key, str(value)[:500])  # the longest value that every server accepts

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


class TrackioLogger(MetricLogger):
    """Logs numbers and settings to Trackio; a resumed run continues its Trackio run.

    project: name of the project in the dashboard.
    space_id: Hugging Face space that shows the dashboard; None for a local dashboard.
    """

    def __init__(self, project: str, space_id: str | None) -> None:
        require_package("trackio")
        self._project, self._space_id = project, space_id

    def open(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        import trackio

        values = flat(dict(config))
        settings = {key: value for key, value in values.items() if not key.rpartition(".")[2].startswith("_")}
        self._run = trackio.init(
            project=self._project, name=folder.name, space_id=self._space_id, config=settings, resume="allow"
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def require_package(package: str) -> None:
    """Raise ConfigError if the package of a logger is not installed. Logger, package and extra have one name."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"logger={package} needs {package}, which is not installed: {installation(package)}")


class MaskingFormatter(logging.Formatter):
    """Masks the passwords of URLs in log messages."""

    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))


def quiet_libraries() -> None:
    """Show the messages of this package on the terminal, and only warnings of other libraries."""
    rank = launch.read().rank
    handler = logging.StreamHandler()
    handler.setFormatter(MaskingFormatter("%(levelname)s %(message)s" if rank == 0 else f"rank {rank}: %(message)s"))
    logging.basicConfig(force=True, handlers=[handler])
    # Deprecation warnings of torch: the oldest supported version still needs these names.
    warnings.filterwarnings("ignore", message=".* is deprecated", category=FutureWarning)
    logging.getLogger("clipzoo").setLevel(logging.INFO if rank == 0 else logging.ERROR)
