"""Requests to stop: handled at once or after the current step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from clipzoo.distributed import launch
from clipzoo.distributed.launch import exit_on_error
from clipzoo.distributed.preemption import Spares
from tests.support.paths import ROOT

CODE = """
import os, signal, sys
from clipzoo.distributed.preemption import Preemption
from clipzoo.distributed.watchdog import Watchdog
{before}
preemption = Preemption(Watchdog())
with preemption.deferred():
    {latched}
    print("latched", preemption.requested, flush=True)
print("behind", flush=True)
{behind}
print("end", flush=True)
"""
ASK = "os.kill(os.getpid(), signal.SIGUSR1)"


def outcome(before: str = "", latched: str = "pass", behind: str = "pass") -> tuple[int, list[str], str]:
    """Exit code, what was printed, what was said to the user; in a fresh fork, for handlers are the process's."""
    code = CODE.format(before=before, latched=latched, behind=behind)
    out, said = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(out[1], 1)
        os.dup2(said[1], 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        try:
            exec(code, {})
            sys.stdout.flush()
        finally:
            os._exit(0)
    os.close(out[1])
    os.close(said[1])
    printed, text = os.fdopen(out[0]).read(), os.fdopen(said[0]).read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), printed.splitlines(), text


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_deferred_request_exits_with_75_after_the_block(name):
    code, printed, said = outcome(latched=f"os.kill(os.getpid(), signal.{name})")
    assert (code, printed) == (75, ["latched True"])
    assert "stopped on request" in said and "run the same command to resume" in said


def test_outside_of_training_and_during_an_evaluation_a_request_exits_at_once():
    assert outcome() == (0, ["latched False", "behind", "end"], "")
    assert outcome(behind=ASK)[:2] == (75, ["latched False", "behind"])
    latched = f"""
    with preemption.immediate():
        {ASK}
        print("not reached", flush=True)
    """.strip()
    assert outcome(latched=latched)[:2] == (75, [])


def test_the_launchers_handler_is_called_after_saving():
    before = "signal.signal(signal.SIGUSR2, lambda number, frame: (print('requeue', number), sys.exit(1)))"
    code, printed, _ = outcome(before, latched="os.kill(os.getpid(), signal.SIGUSR2)")
    assert (code, printed) == (75, ["latched True", f"requeue {signal.SIGUSR2.value}"])


def test_a_second_keyboard_interrupt_ends_the_process_at_once():
    latched = "os.kill(os.getpid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGINT)"
    assert "latched True" not in outcome(latched=latched)[1]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("command", "requests"),
    [("train", [(signal.SIGTERM, 0), (signal.SIGINT, 6)]), ("evaluate", [(signal.SIGUSR1, 3)])],
)
def test_a_request_during_the_imports_exits_with_75(command, requests, tmp_path):
    # runs: the demo in this checkout may be finished, and the command at its end before it imports torch.
    arguments = ["experiment=demo/clip", f"runs={tmp_path}"] if command == "train" else ["model=ViT-B-32"]
    for number, modules in requests:
        process = subprocess.Popen(
            [sys.executable, "-v", "-m", "clipzoo.cli", command, *arguments],
            cwd=ROOT, stderr=subprocess.PIPE, text=True,
            # A shell starts its background jobs, this test perhaps among them, with SIGINT ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        assert process.stderr is not None
        # -v prints a line for every module.
        lines = (line for line in process.stderr if line.startswith("import ") and "'torch." in line)
        for _ in range(modules + 1):
            next(lines)
        process.send_signal(number)
        said = process.stderr.read()
        assert process.wait(200) == 75, said
        assert "clipzoo: stopped on request before the run began; run the same command again" in said


@pytest.mark.parametrize(
    ("restarts", "ranks", "batch", "used"), [(3, 24, 2048, 16), (3, 3, 12, 3), (3, 7, 11, 1), (0, 24, 2048, 24)]
)
def test_only_an_elastic_run_leaves_out_ranks_that_the_batch_cannot_be_divided_among(
    restarts, ranks, batch, used, monkeypatch
):
    for name, value in {"WORLD_SIZE": ranks, "RANK": 0, "TORCHELASTIC_MAX_RESTARTS": restarts}.items():
        monkeypatch.setenv(name, str(value))
    assert Spares(batch).count == ranks - used
    assert launch.read().world_size == used


def test_restarts_on_the_store_of_torchrun_are_warned_of(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    Spares(2048)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in capsys.readouterr().err


PRINT = "from clipzoo.distributed.launch import exit_on_error\nwith exit_on_error():\n    print('x', flush=True)"


def test_a_closed_stdout_ends_a_command_in_silence():
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run([sys.executable, "-c", PRINT], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_another_broken_pipe_is_a_message(capfd):
    with pytest.raises(SystemExit) as end, exit_on_error():
        raise BrokenPipeError("a process has ended")
    assert end.value.code == 1 and "BrokenPipeError: a process has ended" in capfd.readouterr().err
