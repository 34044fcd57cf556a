"""The benchmark of a GPU: every part at small sizes on a CPU, and what it does when a part fails."""

from __future__ import annotations

import ast
import io
import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from clipzoo import ConfigError
from clipzoo.config.groups import VARIABLE
from tests.support.paths import ROOT
from tests.support.processes import run_script, wait_until_gone


@pytest.fixture(autouse=True)
def _folder_of_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.setenv(VARIABLE, str(ROOT / "scripts" / "benchmarks" / "conf"))


def bench(module: str) -> Any:
    return import_module(f"benchmarks.{module}")


def outcome(*rows: dict[str, Any], status: str = "done", lines: tuple[str, ...] = (), reason: str = "") -> Any:
    return bench("measurement").Outcome(status, 1.0, list(rows), list(lines), reason)


def settings(folder: Path, seconds: float = 5.0) -> Any:
    return bench("measurement").Settings("cpu", True, seconds, str(folder / "rows"))


def run(program: str, folder: Path, seconds: float = 5.0) -> Any:
    """The outcome of a Python program as a part, which gets its settings as sys.argv[1]."""
    command = [sys.executable, "-c", program]
    return bench("measurement").run_part(command, settings(folder, seconds), {}, io.StringIO(), lambda line: None)


def test_every_operation_with_triton_kernels_is_proved():
    names = {
        getattr(node, "name", "")
        for path in (ROOT / "clipzoo" / "ops").glob("triton_*.py")
        for node in ast.parse(path.read_text()).body
    }
    operations = {name.removesuffix("_forward") for name in names if name.endswith("_forward")}
    # log_sum_exps runs the kernels of negative_sums.
    names = {*operations, "log_sum_exps"}
    assert names == set(bench("gpu").OPERATIONS) == set(bench("kernels").CASES) == set(bench("kernels").CHECKS)


def test_the_parts_are_expected_to_end_within_nine_minutes():
    parts = bench("gpu").PARTS.values()
    assert sum(part.expected for part in parts) <= 0.95 * 9 * 60
    assert all(part.expected < part.limit for part in parts)


@pytest.mark.parametrize("error", [0.0, 1e-3, float("nan")])
def test_a_kernel_with_an_error_above_its_bound_is_not_proved(error, tmp_path):
    kernels = bench("kernels")

    def cases(*_: Any) -> Any:
        for added in (0.0, error):
            ours: Callable[..., Any] = lambda leaf, added=added: ((leaf + added).square(),)  # noqa: E731
            yield kernels.Case([torch.ones(5)], ours, lambda leaf: (leaf.square(),), 1e-4, 1e-4)

    recorder = bench("measurement").Recorder(settings(tmp_path))
    row = kernels.worst(cases, recorder, "fp32", "exact")
    assert row["cases"] == 2 and row["proved"] == (error == 0)


def test_a_row_that_fails_or_comes_too_late_leaves_the_others_alone(tmp_path):
    def broken() -> dict[str, Any]:
        raise ValueError("no such size")

    def large() -> dict[str, Any]:
        raise torch.OutOfMemoryError

    recorder = bench("measurement").Recorder(settings(tmp_path, seconds=300))
    for name, function in (("a", broken), ("b", large), ("c", lambda: {"seconds": 1.0})):
        recorder.measure("table", name, function)
    bench("measurement").Recorder(settings(tmp_path, seconds=0)).measure("table", "d", broken)
    rows = list(bench("measurement").read_rows(tmp_path / "rows"))
    assert [row["name"] for row in rows] == ["a", "b", "c", "d"]
    assert rows[0]["failed"] == "ValueError: no such size" and rows[1]["out_of_memory"] and rows[2]["seconds"] == 1.0
    assert "left_out" in rows[3]
    assert not outcome(rows[0]).succeeded and outcome(*rows[1:]).succeeded
    assert not outcome({"table": "checks", "name": "e", "proved": False}).succeeded


def test_the_report_names_failed_parts_missing_memory_and_unmeasured_values(tmp_path):
    step = {"table": "heads", "batch": 8, "tflop": 0.1, "tflops": 2.0, "peak_mib": None}
    rows = [
        {**step, "name": "open_clip", "seconds": 0.2},
        {**step, "name": "clip", "seconds": 0.1},
        {"table": "heads", "name": "kme", "out_of_memory": True},
        {"table": "heads", "name": "x", "failed": "KeyError"},
    ]
    outcomes = {"heads": outcome(*rows), "probe": outcome(status="stopped", lines=("last line",), reason="after 9 s")}
    parts = ["heads", "probe", "loader"]
    facts = {"date": "2026-01-01", "device": "cpu", "small": True, "parts": parts, "seconds": 3.0}
    bench("gpu_report").write_report(tmp_path, facts, outcomes)
    text = (tmp_path / "report.md").read_text()
    assert "| clip | 100.0 | 0.50 | not measured | 0.1 | 2 | 8 |" in text
    assert "| kme | out of memory |" in text and "- x: KeyError" in text
    assert "stopped after 9 s" in text and "last line" in text and "| loader | not yet run |" in text
    assert (tmp_path / "heads.png").stat().st_size > 1000
    assert json.loads((tmp_path / "results.json").read_text())["results"]["probe"]["succeeded"] is False
    assert {path.name for path in tmp_path.iterdir()} <= set(bench("gpu_report").FILES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu"], "add --small"),
        (["--device", "cpu", "--small"], "report.md|--overwrite"),
        (["--parts", "nosuch"], "nosuch"),
    ],
)
def test_results_are_not_overwritten_and_a_cpu_is_only_for_a_rehearsal(arguments, message, tmp_path, monkeypatch):
    (tmp_path / "report.md").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "gpu", *arguments, "--output", str(tmp_path)])
    with pytest.raises(ConfigError, match=message):
        import_module("benchmark").main()
    assert (tmp_path / "report.md").read_text() == "mine"


@pytest.mark.slow
def test_a_part_that_fails_shows_its_last_lines_and_keeps_its_rows(tmp_path):
    row = '{"table": "a", "name": "b"}'
    program = f"import json, sys; open(json.loads(sys.argv[1])['rows'], 'w').write('{row}\\n{{\"cut'); "
    failed = run(program + "print('hello'); raise SystemExit('broken')", tmp_path)
    assert (failed.status, failed.reason) == ("failed", "exit code 1")
    assert failed.lines == ["hello", "broken"] and failed.rows == [json.loads(row)]
    killed = run(program + "import os; os.kill(os.getpid(), 9)", tmp_path)
    assert (killed.status, killed.reason) == ("failed", "killed by SIGKILL")
    assert run(program, tmp_path).succeeded


def test_a_part_of_several_processes_fails_with_one_of_them():
    row = {"table": "a", "name": "b"}
    both = bench("measurement").merged(
        [outcome(row), outcome(row, status="stopped", lines=("last",), reason="after 9 s")]
    )
    assert (both.status, both.reason, both.lines, both.rows) == ("stopped", "after 9 s", ["last"], [row, row])


@pytest.mark.slow
def test_a_part_that_hangs_is_stopped_with_the_processes_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(bench("measurement"), "GRACE", 0.0)
    program = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '100']); print(p.pid, flush=True); p.wait()"
    stopped = run(program, tmp_path, seconds=3.0)
    assert stopped.status == "stopped" and stopped.seconds < 20
    assert wait_until_gone([int(stopped.lines[0])], seconds=5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_part_runs_at_small_sizes_on_a_cpu(tmp_path):
    folder = tmp_path / "report"
    arguments = ("--device", "cpu", "--small", "--minutes", "30", "--output", folder)
    run_script("scripts/benchmark.py", "gpu", *arguments, log=tmp_path / "log", seconds=1700)
    results = json.loads((folder / "results.json").read_text())["results"]
    assert list(results) == list(bench("gpu").PARTS)
    assert all(part["status"] == "done" and part["rows"] for part in results.values())
    text = (folder / "report.md").read_text()
    assert all(f"## {heading}" in text for heading, _, _ in bench("gpu_report").TABLES.values())
    assert all((folder / name).exists() for name in bench("gpu_report").FILES)
    assert "does not hold" not in text and "failed" not in text and "not measured" in text
