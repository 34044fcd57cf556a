"""What a run writes down: metrics.jsonl as the truth, W&B and TensorBoard as copies that never stop it."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from clipzoo.build import build_part
from clipzoo.config.compose import compose
from clipzoo.errors import ConfigError
from clipzoo.training.loggers import Logger, MetricLogger, TensorBoardLogger, WandbLogger
from tests.support.paths import ROOT

CONFIG = {"seed": 0, "trainer": {"global_batch": 8}}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_drops_lines_after_its_checkpoint_and_truncated_lines(tmp_path):
    first, again = Logger(), Logger()
    first.open(tmp_path, CONFIG, 0)
    for step in range(1, 6):
        first.log(step, {"loss": float(step)})
    first.log(3, {"event": "evaluation", "top1": 1.0})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    again.open(tmp_path, CONFIG, 3)
    again.log(4, {"loss": 40.0})
    again.close()
    assert lines(tmp_path) == [{"step": step, "loss": value} for step, value in ((1, 1), (2, 2), (3, 3), (4, 40))]


@pytest.fixture
def picture(tmp_path) -> Path:
    Image.new("RGB", (8, 8)).save(tmp_path / "curves.png")
    return tmp_path / "curves.png"


def log_twice(make: Callable[[], Logger], folder: Path, picture: Path) -> None:
    """Log steps 1 to 4 and, after a resume from step 2, steps 3 and 4 again and the final metrics."""
    for start in (0, 2):
        chosen = make()
        chosen.open(folder, CONFIG, start)
        for step in range(start + 1, 5):
            chosen.log(step, {"loss": 10.0 * start + step, "epoch": 0.1})
        if start:
            chosen.report({"zero_shot/demo/top1": 40.0}, [picture])
        chosen.close()


@pytest.mark.medium
def test_wandb_offline_keeps_one_run_over_resumes_with_config_revision_curves_table_and_pictures(
    tmp_path, monkeypatch, picture
):
    import wandb

    monkeypatch.setenv("CLIPZOO_SWEEP", "sweep-1234")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    log_twice(lambda: Logger({"wandb": WandbLogger("offline", "clipzoo", None, None)}), tmp_path, picture)
    wandb.teardown()  # its process writes the files in its own time, and whole by its end
    first, second = (records(path) for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")))
    assert first["run"].run_id == second["run"].run_id == (tmp_path / "wandb_id").read_text()
    assert second["run"].run_group == "sweep-1234"
    config = {item.key: json.loads(item.value_json) for item in first["run"].config.update}
    assert config["trainer"] == {"global_batch": 8} and "revision" in config
    assert {"loss", "epoch"} <= first["history"]
    assert {"metrics", "report/curves"} <= second["history"]


def records(path: Path) -> dict[str, Any]:
    """The run and the names in the history of an offline run's file."""
    from wandb.proto import wandb_internal_pb2

    entries: dict[str, Any] = {"history": set()}
    for data in logged(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            entries["run"] = record.run
        entries["history"] |= {item.key or item.nested_key[0] for item in record.history.item}
    return entries


def logged(content: bytes) -> Iterator[bytes]:
    """The entries of a file in LevelDB's log format: blocks of 32 KiB, each piece with checksum, length and kind."""
    place, entry = 7, b""
    while place + 7 <= len(content):
        if -place % 32768 < 7:
            place += -place % 32768
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        entry += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield entry
            entry = b""


def test_tensorboard_has_curves_and_pictures_and_after_a_resume_hides_what_was_logged_after_the_checkpoint(
    tmp_path, picture
):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_twice(lambda: Logger({"tensorboard": TensorBoardLogger()}), tmp_path, picture)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1), (2, 2), (3, 23), (4, 24)]
    assert "report/curves" in events.Tags()["images"]


(BLOCK,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "how_to" / "inspection.md").read_text(), re.DOTALL)


def test_the_documented_logger_is_ten_lines_and_chosen_on_the_command_line(tmp_path, monkeypatch, capsys):
    assert len([line for line in BLOCK.splitlines() if line]) <= 10
    (tmp_path / "my_loggers.py").write_text(BLOCK)
    monkeypatch.syspath_prepend(tmp_path)
    overrides = ["+logger.also.printer._target_=my_loggers.Printer", "+logger.also.printer.every=2"]
    node = compose(overrides, complete=False)["logger"]
    chosen = build_part(node, trust=["my_loggers"])
    chosen.open(tmp_path / "run", CONFIG, 0)
    for step in (1, 2):
        chosen.log(step, {"loss": step / 4, "event": "text"})
    chosen.close()
    assert capsys.readouterr().out == "step 2: loss 0.500\n"


class Failing(MetricLogger):
    """Fails when it is opened, or later."""

    def __init__(self, opens: bool) -> None:
        self.opens = opens

    def open(self, folder: Path, config: object, step: int) -> None:
        if not self.opens:
            raise OSError("no network")

    def log(self, step: int, values: object) -> None:
        raise OSError("no network")

    def report(self, metrics: object, pictures: object) -> None:
        assert self.opens


@pytest.mark.parametrize("opens", [False, True])
def test_a_logger_that_fails_is_named_once_and_the_log_continues(tmp_path, caplog, opens):
    chosen = Logger({"failing": Failing(opens)})
    chosen.open(tmp_path, CONFIG, 0)
    for step in (1, 2):
        chosen.log(step, {"loss": 1.0})
    chosen.report({"top1": 1.0}, [])
    chosen.close()
    assert caplog.messages == ["logging continues without failing: OSError: no network"]
    assert len(lines(tmp_path)) == 2


@pytest.mark.parametrize("name", ["mlflow", "tensorboard", "trackio"])
def test_a_missing_package_is_one_clear_message(monkeypatch, name):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"logger={name} needs {name}.*pip install -e .*\[{name}\]"):
        build_part(compose([f"logger={name}"], complete=False)["logger"])


@pytest.mark.medium
def test_mlflow_keeps_one_run_over_resumes_with_settings_curves_and_pictures(tmp_path, monkeypatch, picture):
    # A folder needs no server and, unlike a database, no further package.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    uri = f"file:{tmp_path / 'mlruns'}"
    node = compose(["logger=mlflow", f"logger.also.mlflow.uri='{uri}'"], complete=False)["logger"]
    log_twice(partial(build_part, node), tmp_path / "run", picture)
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("clipzoo").experiment_id])
    assert run.info.run_name == "run" and run.info.status == "FINISHED"
    assert run.data.params["trainer.global_batch"] == "8"
    points = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "loss")]
    assert points == [(1, 1), (2, 2), (3, 3), (4, 4), (3, 23), (4, 24)]
    assert run.data.metrics["final/zero_shot/demo/top1"] == 40.0
    assert [file.path for file in client.list_artifacts(run.info.run_id, "report")] == ["report/curves.png"]


@pytest.mark.medium
def test_trackio_keeps_one_run_over_resumes(tmp_path, monkeypatch, picture):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    log_twice(partial(build_part, compose(["logger=trackio"], complete=False)["logger"]), tmp_path / "run", picture)
    (run,) = trackio.Api().runs("clipzoo")
    assert run.name == "run"
