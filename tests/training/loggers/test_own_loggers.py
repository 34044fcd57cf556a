"""Loggers beside metrics.jsonl: the documentation's own one, MLflow and Trackio."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from clipzoo.build import build_part
from clipzoo.config.compose import compose
from clipzoo.errors import ConfigError
from clipzoo.training.loggers import Logger, MetricLogger
from tests.support.paths import ROOT

(BLOCK,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "how_to" / "inspection.md").read_text(), re.DOTALL)
CONFIG = {"seed": 3, "trainer": {"global_batch": 8}}


def logger(**also: MetricLogger) -> Logger:
    return Logger(also)


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
    def log(self, step: int, values: object) -> None:
        raise OSError("no network")


def test_a_logger_that_fails_is_named_and_not_used_again(tmp_path, caplog):
    chosen = logger(failing=Failing())
    chosen.open(tmp_path, CONFIG, 0)
    chosen.log(1, {"loss": 1.0})
    chosen.log(2, {"loss": 0.5})
    chosen.close()
    assert caplog.text.count("logging continues without failing: OSError: no network") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_a_missing_package_is_one_clear_message(monkeypatch, name):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"logger={name} needs {name}.*pip install -e .*\[{name}\]"):
        build_part(compose([f"logger={name}"], complete=False)["logger"])


@pytest.mark.medium
def test_mlflow_keeps_one_run_over_resumes_with_settings_curves_and_pictures(tmp_path, monkeypatch):
    # A folder needs no server and, unlike a database, no further package.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    uri = f"file:{tmp_path / 'mlruns'}"
    node = compose(["logger=mlflow", f"logger.also.mlflow.uri='{uri}'"], complete=False)["logger"]
    picture = tmp_path / "curves.png"
    Image.new("RGB", (8, 8)).save(picture)
    log_twice(node, tmp_path / "run", picture)
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("clipzoo").experiment_id])
    assert run.info.run_name == "run" and run.info.status == "FINISHED"
    assert run.data.params["trainer.global_batch"] == "8"
    assert [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "loss")] == [
        (1, 1.0),
        (3, 3.0),
    ]
    assert run.data.metrics["final/zero_shot/demo/top1"] == 40.0
    assert [file.path for file in client.list_artifacts(run.info.run_id, "report")] == ["report/curves.png"]


@pytest.mark.medium
def test_trackio_keeps_one_run_over_resumes(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    log_twice(compose(["logger=trackio"], complete=False)["logger"], tmp_path / "run", tmp_path / "none.png")
    (run,) = trackio.Api().runs("clipzoo")
    assert run.name == "run"


def log_twice(node: dict, folder: Path, picture: Path) -> None:
    """Log a step, and after a resume another one with the final metrics."""
    for start in (0, 2):
        chosen = build_part(node)
        chosen.open(folder, CONFIG, start)
        chosen.log(start + 1, {"loss": float(start + 1)})
        if start:
            chosen.report({"zero_shot/demo/top1": 40.0}, [picture])
        chosen.close()
