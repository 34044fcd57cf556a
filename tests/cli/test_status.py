"""`clipzoo ls` and `clipzoo watch` in terminals of 80 and 200 columns, piped, and as JSON."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from clipzoo.cli.status import duration
from tests.support.paths import ROOT

COMMAND = [sys.executable, "-m", "clipzoo.cli"]
NAMES = ("short", "head-kme+objective.temperature-0.05+trainer.epochs-40+data.shards-cc12m-1a2b3c4d")
REASON = "step 812 diverged (losses of the ranks: nan; gradient norm nan; trainer.loss_limit=10000). Lower " * 2


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs that have ended: one whose lock holds a long reason, and one with evaluations."""
    for name in NAMES:
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("trainer:\n  global_batch: 16\n  epochs: null\n  steps: 1000\n")
        lines = [{"step": step, "loss": 9.0 / step, "samples_per_second": 50.0} for step in range(1, 100)]
        lines.append({"step": 99, "event": "evaluation", "zero_shot/shapes/top1": 97.25})
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run / ".lock").write_text(f"process 1 on here since 2026\n1 {REASON}\n")
    return tmp_path / "runs"


def heed_ctrl_c() -> None:
    """A shell that runs the suite in the background lets its processes ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def in_terminal(columns: int, *arguments: object, seconds: float | None = None) -> tuple[int, list[str]]:
    """Run a command in a terminal of this width; return its exit code and its lines. seconds: then Ctrl-C."""
    own, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    command = [*COMMAND, *map(str, arguments)]
    process = subprocess.Popen(
        command, stdout=child, stdin=child, cwd=ROOT, env={**environment, "TERM": "xterm"}, preexec_fn=heed_ctrl_c
    )
    os.close(child)
    text = b""
    if seconds is not None:
        while b"short" not in text:
            text += os.read(own, 2**16)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
    while True:
        try:
            part = os.read(own, 2**16)
        except OSError:  # the other end is closed
            break
        text += part
        if not part:
            break
    os.close(own)
    screens = text.decode().replace("\x1b[H", "\n").replace("\r", "")
    return process.wait(), re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screens).split("\n")


@pytest.mark.medium
@pytest.mark.parametrize("columns", [80, 200])
def test_no_line_is_wider_than_the_terminal_and_names_keep_their_ends(runs, columns):
    code, lines = in_terminal(columns, "ls", runs)
    text = "\n".join(lines)
    assert code == 0 and max(map(len, lines)) <= columns, text
    assert text.count("97.25") == 2 and text.count("99/1000") == 2 and "1a2b3c4d" in text
    assert ("zero_shot/shapes/top1" in text) == ("evaluation at step 99" in text) == (columns == 200)
    assert any(line.startswith("head-kme+objective.") for line in lines)
    assert " ".join(text.split()).count("step 812 diverged (losses of the ranks: nan; gradient norm nan;") >= 2


@pytest.mark.medium
def test_piped_lines_are_whole_and_json_has_all_facts(runs):
    piped = subprocess.run([*COMMAND, "ls", runs], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    head, *rows = piped.splitlines()
    assert len(rows) == 2 and head.startswith("run ") and "\x1b" not in piped
    assert all(name in piped for name in NAMES) and all(row.endswith(REASON.strip()) for row in rows)
    answer = subprocess.run([*COMMAND, "ls", runs, "--json"], cwd=ROOT, capture_output=True, text=True, check=True)
    facts = {Path(row["folder"]).name: row for row in json.loads(answer.stdout)}
    assert facts["short"]["state"] == "failed" and facts["short"]["best"] == 97.25 and facts["short"]["total"] == 1000


@pytest.mark.medium
def test_watch_shows_a_live_screen_until_ctrl_c(runs):
    code, lines = in_terminal(80, "watch", runs, "--every", "1", seconds=1.5)
    assert code == 0 and max(map(len, lines)) <= 80
    assert sum("99/1000" in line for line in lines) >= 2


@pytest.mark.medium
def test_a_piped_watch_prints_a_line_for_each_change(runs):
    with subprocess.Popen(
        [*COMMAND, "watch", runs, "--every", "1"], cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c
    ) as process:
        assert process.stdout is not None
        first = [process.stdout.readline(), process.stdout.readline()]
        with (runs / "short" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 500, "loss": 0.1}\n')
        changed = process.stdout.readline()
        process.send_signal(signal.SIGINT)
    assert process.returncode == 0
    assert all("99/1000" in line for line in first) and "short" in changed and "500/1000" in changed


def test_listing_imports_neither_torch_nor_pandas_nor_hydra(runs):
    code = (
        f"import sys; sys.argv = ['clipzoo', 'ls', {str(runs)!r}]; from clipzoo.cli.__main__ import main; main()\n"
        "print({'torch', 'pandas', 'hydra', 'numpy', 'rich', 'fsspec'} & set(sys.modules))"
    )
    listed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert listed.stdout.splitlines()[-1] == "set()"


def test_durations_are_short():
    seconds = (42.4, 89, 90, 60 * 89, 60 * 90, 47 * 3600, 3 * 86400)
    assert [*map(duration, seconds)] == ["42 s", "89 s", "2 min", "89 min", "1 h 30", "47 h 00", "3 d"]
