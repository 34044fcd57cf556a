"""The shipped batch scripts on a SLURM of two nodes on this machine. `make test-slurm` runs these."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch

from clipzoo.cli.evaluate import evaluate
from clipzoo.data.maps.engines import run_map
from tests.support.evaluation_sets import write_sets
from tests.support.maps import Members, written
from tests.support.paths import ROOT
from tests.support.runs import assert_close, assert_equal, overrides, train, weights
from tests.support.shards import write_numbered

pytestmark = pytest.mark.slurm
STEPS = 12
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=2")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Path]:
    """A running SLURM; the folder that logs of jobs go to."""
    folder = tmp_path_factory.mktemp("slurm")
    started = subprocess.run(
        ["tests/support/local_slurm.sh", "start", str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    if started.returncode == 3:
        pytest.skip(started.stderr.strip())
    assert started.returncode == 0, started.stderr
    conf, bound = {"SLURM_CONF": str(folder / "slurm.conf")}, {"SLURM_CPU_BIND": "cores"}
    os.environ |= {**conf, **bound, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    yield folder
    subprocess.run(["tests/support/local_slurm.sh", "stop", str(folder)], cwd=ROOT, check=True)


@pytest.fixture(scope="module")
def alone(tiny_shards, tmp_path_factory) -> Path:
    """The same training in one process without SLURM."""
    runs = tmp_path_factory.mktemp("alone")
    train(tiny_shards, runs, f"trainer.steps={STEPS}")
    return runs


def call(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_until(holds: Callable[[], object], seconds: float = 900, state: Callable[[], str] | None = None) -> None:
    """state: of a job, for the message."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, state() if state else call("squeue")
        time.sleep(0.2)


class Job:
    """A batch job of this SLURM."""

    def __init__(self, folder: Path, script: str, options: tuple[str, ...], *arguments: str, pause: float = 0) -> None:
        self.log = folder / f"{script}-{time.monotonic_ns()}.log"
        options = (*options, f"--output={self.log}", f"--export=ALL,PAUSE={pause}")
        self.number = re.findall(r"\d+", call("sbatch", *options, f"slurm/{script}.sbatch", *arguments))[-1]

    @property
    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def fact(self, name: str) -> str:
        return re.findall(rf"\b{name}=(\S+)", call("scontrol", "show", "job", "-o", self.number))[0]

    def state(self) -> str:
        return f"job {self.number} is {self.fact('JobState')}:\n{self.text}"

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.text, 500, lambda: f"no {text!r}: {self.state()}")

    def wait(self, end: str = "COMPLETED") -> None:
        active = "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "PREEMPTED"
        wait_until(lambda: self.fact("JobState") not in active, 900, self.state)
        assert self.fact("JobState") == end, self.state()


def run_on_two_nodes(folder: Path, shards: str, runs: Path, *changes: str, pause: float = 0) -> Job:
    settings = overrides(shards, runs, "name=run", f"trainer.steps={STEPS}", "trainer.checkpoints.every=1000", *changes)
    return Job(folder, "train", TWO_NODES, *settings, pause=pause)


def test_two_nodes_train_the_weights_of_one_process(slurm, tiny_shards, alone, tmp_path):
    job = run_on_two_nodes(slurm, tiny_shards, tmp_path)
    job.wait()
    assert "100 samples, 16 per step, 2 ranks" in job.text
    assert_close(weights(tmp_path, STEPS), weights(alone, STEPS))


def cores(job: Job) -> tuple[list[int], list[int]]:
    """Number of cores that each rank, and each loader process, of a running job on two nodes may use."""
    tasks = processes(f"SLURM_JOB_ID={job.number}", "CLIPZOO_SLURM_MASTER=127.0.0.1", "SLURM_STEP_NUM_TASKS=2")
    ranks: list[int] = []
    loaders: list[int] = []
    for task in tasks:
        group = loaders if task.parent / parent(task) in tasks else ranks
        group.append(len(os.sched_getaffinity(int(task.name))))
    return ranks, loaders


def test_srun_of_this_slurm_binds_tasks_to_one_core_unless_they_ask_for_more(slurm, tmp_path):
    script = "srun env -u OMP_NUM_THREADS nproc"
    call("sbatch", "--wait", *TWO_NODES, f"--output={tmp_path}/log", f"--wrap={script}; SRUN_CPUS_PER_TASK=2 {script}")
    assert (tmp_path / "log").read_text().split() == ["1", "1", "2", "2"]


def test_ranks_and_their_loader_processes_have_the_cores_of_their_task(slurm, tiny_shards, tmp_path):
    job = run_on_two_nodes(slurm, tiny_shards, tmp_path, "data.workers=auto", pause=0.7)
    job.wait_for("step 2/")
    assert cores(job) == ([2, 2], [2, 2])
    job.wait()
    assert "on the CPU with 1 thread, 2 cores, 1 loader process per rank" in job.text
    assert not re.search(r"share (one|\d+) core", job.text)


def test_a_preempted_job_is_requeued_and_ends_with_the_same_weights(slurm, tiny_shards, tmp_path):
    plain = run_on_two_nodes(slurm, tiny_shards, tmp_path / "plain")
    plain.wait()
    job = run_on_two_nodes(slurm, tiny_shards, tmp_path / "preempted", pause=0.7)
    job.wait_for("step 2/")
    call("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", f"--output={slurm}/urgent.log", "--wrap=sleep 1")
    job.wait()
    assert int(job.fact("Restarts")) == 1
    assert re.search(r"stopped on request and saved after step \d+;", job.text) and "resuming from step" in job.text
    assert_equal(weights(tmp_path / "preempted", STEPS), weights(tmp_path / "plain", STEPS))


def lose(node: str, folder: Path, job: Job) -> None:
    """Kill the daemon of a node and all that runs on it, as a loss of power does."""
    tasks = processes(f"SLURMD_NODENAME={node}", f"SLURM_JOB_ID={job.number}")
    supervisors = {Path("/proc") / parent(task) for task in tasks}
    supervisors = {path for path in supervisors if (path / "comm").read_text().startswith("slurmstepd")}
    daemon = Path("/proc") / (folder / f"slurmd.{node}.pid").read_text().strip()
    assert tasks and supervisors
    kill((daemon, *supervisors, *tasks))


def kill(processes: Iterable[Path]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process.name), signal.SIGKILL)


def processes(*variables: str) -> list[Path]:
    """Return the folders in /proc of the processes that have these environment variables."""
    wanted = {variable.encode() for variable in variables}
    return [path.parent for path in Path("/proc").glob("[0-9]*/environ") if wanted <= entries(path)]


def parent(process: Path) -> str:
    return (process / "stat").read_text().rpartition(")")[2].split()[1]


def entries(path: Path) -> set[bytes]:
    try:
        return set(path.read_bytes().split(b"\0"))
    except OSError:
        return set()


def test_a_job_that_loses_a_node_is_requeued_and_goes_on_when_the_node_is_back(slurm, tiny_shards, alone, tmp_path):
    job = run_on_two_nodes(slurm, tiny_shards, tmp_path, "trainer.checkpoints.every=1", pause=0.7)
    job.wait_for("step 4/")
    lose("node2", slurm, job)
    job.wait_for("== a node was lost in attempt 1, requeued")
    # As SLURM does by itself after SlurmdTimeout. The node returns without a command (ReturnToService), but not within
    # KillWait: what SLURM still has to tell the node would end the next attempt.
    call("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=lost")
    time.sleep(45)
    call("slurmd", "-N", "node2")
    job.wait()
    assert int(job.fact("Restarts")) >= 1
    assert int(re.findall(r"resuming from step (\d+)", job.text)[-1]) >= 2
    assert_close(weights(tmp_path, STEPS), weights(alone, STEPS))


def test_the_warning_before_the_time_limit_requeues_the_job(slurm, tiny_shards, alone, tmp_path):
    job = run_on_two_nodes(slurm, tiny_shards, tmp_path, pause=0.7)
    job.wait_for("step 2/")
    call("scancel", "--signal=USR1", job.number)  # what --signal=USR1@120 sends
    job.wait_for("== stopped in attempt 1, requeued")
    job.wait()
    assert int(job.fact("Restarts")) == 1
    weights(tmp_path, STEPS)


def test_a_cancelled_job_saves_and_stays_cancelled(slurm, tiny_shards, tmp_path):
    job = run_on_two_nodes(slurm, tiny_shards, tmp_path, pause=0.7)
    job.wait_for("step 2/")
    call("scancel", job.number)
    job.wait("CANCELLED")
    assert list((tmp_path / "run" / "checkpoints").glob("step_*.json"))
    assert "requeued" not in job.text


def test_a_sweep_of_four_points_is_an_array_and_yields_its_table(slurm, tiny_shards, tmp_path):
    launch = [sys.executable, "-m", "clipzoo.cli", "launch"]
    sweep = overrides(tiny_shards, tmp_path, "optim.schedule.peak=1e-4,1e-3", "seed=0,1", "logger=none")
    options = f"--nodes=1 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=1 --output={tmp_path}/%a.log"
    number = re.findall(r"\d+", call(*launch, "--submit", "--sbatch", options, *sweep))[-1]
    wait_until(lambda: not call("squeue", "-h", "-j", number))
    listed = call(*launch, *sweep).splitlines()
    assert len(listed) == 4 and all(line.endswith("finished") for line in listed), listed
    lines = call(*launch, "--table", *sweep).strip().splitlines()
    assert lines[0].split()[:2] == ["optim.schedule.peak", "loss"]
    assert [line.split()[0] for line in lines[1:3]] == ["0.0001", "0.001"]
    assert Path(lines[-1].removeprefix("the comparison of the runs: ")).exists()


def test_an_array_draws_from_one_search_and_goes_on_after_a_kill_and_a_warning(slurm, tiny_shards, tmp_path):
    launch = [sys.executable, "-m", "clipzoo.cli", "launch"]
    drawn = ["search.sampler=random", "search.trials=4", "search.minimize=loss", "seed=0", "logger=none"]
    search = overrides(tiny_shards, tmp_path, "optim.schedule.peak=tag(log,interval(1e-4,1e-2))", *drawn)
    options = "--nodes=1 --ntasks-per-node=2 --gpus-per-node=2 --cpus-per-task=1 --export=ALL,PAUSE=0.7 "
    options += f"--output={tmp_path}/%a.log"
    number = re.findall(r"\d+", call(*launch, "--submit", "--at-once", "2", "--sbatch", options, *search))[-1]
    logs = [tmp_path / f"{task}.log" for task in range(2)]
    for log in logs:
        wait_until(lambda log=log: log.exists() and "step 5/" in log.read_text())
    (killed,) = re.findall(r"\bJobId=(\d+)", call("scontrol", "show", "job", "-o", f"{number}_0"))
    kill(processes(f"SLURM_JOB_ID={killed}"))
    call("scancel", "--signal=USR1", f"{number}_1")  # what --signal=USR1@120 sends
    # SLURM starts the task again by itself if its own process was killed too.
    wait_until(lambda: re.search("JobState=FAILED|Restarts=1", call("scontrol", "show", "job", f"{number}_0")))
    if "JobState=FAILED" in call("scontrol", "show", "job", f"{number}_0"):
        call("scontrol", "requeue", f"{number}_0")
    wait_until(lambda: not call("squeue", "-h", "-j", number))
    text = [log.read_text() for log in logs]
    assert "== stopped in attempt 1, requeued" in text[1] and all("resuming from step" in part for part in text)
    trials = [set(re.findall(r"^trial (\d) of 4", part, re.MULTILINE)) for part in text]
    assert trials[0] | trials[1] == set("1234") and all(trials)
    assert len(list(tmp_path.glob("*/results.json"))) == 4
    assert "4 trials: 4 finished" in call(*launch, *search)


def test_the_ranks_of_a_trial_have_the_cores_of_their_task(slurm, tiny_shards, tmp_path):
    drawn = ["search.sampler=random", "search.trials=1", "search.minimize=loss", "logger=none"]
    search = overrides(tiny_shards, tmp_path, "optim.schedule.peak=interval(1e-4,1e-2)", *drawn)
    job = Job(slurm, "search", TWO_NODES, *search)
    job.wait()
    assert "16 per step, 2 ranks, " in job.text and "2 cores, 0 loader processes per rank" in job.text


def test_evaluation_as_a_job_writes_the_metrics_of_one_process(slurm, alone, tmp_path):
    write_sets(tmp_path / "sets")
    settings = [
        "eval=none", f"eval.root={tmp_path / 'sets'}", "eval.zero_shot=[colours]", "eval.workers=0", "device=cpu",
    ]  # fmt: skip
    for name in ("job", "process"):
        shutil.copytree(alone / "run", tmp_path / name)
    job = Job(slurm, "eval", TWO_NODES, f"run={tmp_path / 'job'}", *settings)
    wait_until(lambda: cores(job)[0] == [2, 2])
    job.wait()
    metrics = json.loads((tmp_path / "job" / "evaluation" / "metrics.json").read_text())
    assert "zero_shot/colours/top1" in metrics
    assert metrics == pytest.approx(evaluate([f"run={tmp_path / 'process'}", *settings]))


@pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="pip install -e '.[slurm]'")
def test_hydra_multirun_through_submitit_joins_the_ranks_of_each_point(slurm, tiny_shards, alone, tmp_path):
    launcher = ["nodes=2", "tasks_per_node=1", "gpus_per_node=null", "cpus_per_task=2", "timeout_min=30"]
    settings = overrides(tiny_shards, tmp_path, f"trainer.steps={STEPS}", "seed=0,1", "hydra/launcher=slurm")
    options = [f"hydra.launcher.{setting}" for setting in launcher]
    call(sys.executable, "-m", "clipzoo.cli", "train", "-m", *settings, *options)
    folders = [path.parent for path in tmp_path.glob("*/results.json")]
    assert len(folders) == 2
    logs = [path.read_text() for path in tmp_path.rglob("*_0_log.*")]
    said = "2 ranks, float64 on the CPU with 1 thread, 2 cores, 0 loader processes per rank"
    assert sum(said in log for log in logs) == 2
    files = [path / "checkpoints" / f"step_{STEPS:08d}.pt" for path in folders]
    models = [torch.load(file, weights_only=True)["model"] for file in files]
    expected = weights(alone, STEPS)
    differences = [max(float((model[key] - value).abs().max()) for key, value in expected.items()) for model in models]
    assert min(differences) < 1e-10 < max(differences)


def test_a_map_that_is_killed_ten_times_gives_the_bytes_of_an_undisturbed_one_in_tasks_and_in_an_array(slurm, tmp_path):
    shards, folder = write_numbered(tmp_path / "shards", [1 + number % 3 for number in range(64)]), tmp_path / "map"
    run_map(Members(shards), tmp_path / "expected", "local:1")
    expected = written(tmp_path / "expected")
    command = f"{sys.executable} -m tests.support.maps {shards} {folder} slurm"

    def submit(wrapped: str, *options: str) -> str:
        batch = ["sbatch", "--parsable", "--ntasks-per-node=1", "--cpus-per-task=1", f"--output={tmp_path}/log"]
        return call(*batch, *options, f"--wrap={wrapped}").strip()

    for kill in range(10):
        before = len(written(folder))
        job = submit(f"srun {command}", "--nodes=2", "--export=ALL,PAUSE=0.8")
        wait_until(lambda least=before + 1 + kill % 3: len(written(folder)) >= least, 120)
        call("scancel", "--signal=KILL", job)
        wait_until(lambda job=job: job not in call("squeue", "-h", "-o", "%i"), 120)
        assert written(folder).items() <= expected.items() and before < len(written(folder)) < 64
    # The elements of an array have other shares than the tasks had.
    submit(f"srun {command}", "--array=0-2", "--nodes=1", "--wait")
    assert written(folder) == expected
