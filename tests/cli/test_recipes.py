"""Recipes of `clipzoo launch --to`, read back as their schedulers read them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from clipzoo.cli import launch
from clipzoo.config.compose import compose
from clipzoo.errors import ConfigError
from tests.support.paths import ROOT
from tests.support.runs import free_port, losses, overrides

SHARDS = "data.shards='/data/{0..3}.tar'"
OVERRIDES = ["name=kme", "runs=/runs", "head=clip", SHARDS]
NODES = ["--nodes", "4", "--min-nodes", "2", "--gpus", "8"]


def rendered(capsys: pytest.CaptureFixture[str], kind: str, *options: str) -> str:
    launch.main(["--to", kind, *options, *OVERRIDES])
    return capsys.readouterr().out


def assert_starts_the_training(words: list[str]) -> None:
    """Check a command of torchrun: nodes, ranks and overrides."""
    options = dict(zip(words[1::2], words[2::2], strict=False))
    assert words[0] == "torchrun"
    assert (options["--nnodes"], options["--nproc-per-node"], options["--max-restarts"]) == ("2:4", "8", "3")
    assert words[words.index("train") + 1 :] == OVERRIDES
    assert compose(words[words.index("train") + 1 :])["data"]["shards"] == "/data/{0..3}.tar"


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["value"] for item in container["env"]}


def test_the_script_of_torchrun_is_bash_and_starts_the_training(capsys):
    script = rendered(capsys, "torchrun", *NODES, "--host", "node1")
    subprocess.run(["bash", "-n"], input=script.encode(), check=True)
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n" in script
    words = shlex.split(script.splitlines()[-1])
    assert words[0] == "exec" and words[words.index("--rdzv-endpoint") + 1] == "node1:29400"
    assert_starts_the_training(words[1:])


def test_the_pods_of_kubernetes_meet_at_the_first_one(capsys):
    service, job = yaml.safe_load_all(rendered(capsys, "kubernetes", *NODES))
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    # The service is headless and selects the job's pods: JOB-INDEX.SUBDOMAIN is the name of a pod.
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": "kme"}
    assert pod["subdomain"] == service["metadata"]["name"]
    words = container["command"]
    assert words[words.index("--rdzv-endpoint") + 1] == "kme-0.kme:29400"
    assert_starts_the_training(words)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert variables(container) == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_a_pytorchjob_gives_torchrun_its_nodes_and_ranks(capsys):
    job = yaml.safe_load(rendered(capsys, "pytorchjob", *NODES))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    policy, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert (policy["minReplicas"], policy["maxReplicas"], policy["maxRestarts"]) == (2, 4, 3)
    assert (worker["replicas"], job["spec"]["nprocPerNode"]) == (4, "8")
    # The operator reads only a container of this name, and passes torchrun's options in PET_ variables.
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert container["command"] == ["torchrun", "-m", "clipzoo.cli", "train", *OVERRIDES]


def test_a_task_of_skypilot_finds_its_first_node(capsys):
    task = yaml.safe_load(rendered(capsys, "skypilot", *NODES, "--gpu", "A100"))
    assert (task["num_nodes"], task["resources"]) == (4, {"accelerators": "A100:8"})
    subprocess.run(["bash", "-n"], input=task["run"].encode(), check=True)
    # torchrun's stand-in prints its arguments, as bash passes them.
    script = f"torchrun() {{ printf '%s\\n' torchrun \"$@\"; }}\n{task['run']}"
    environment = {**os.environ, "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    shown = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True).stdout.splitlines()
    assert shown[shown.index("--rdzv-endpoint") + 1] == "10.0.0.1:29400"
    assert_starts_the_training(shown)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kubernetes", "--nodes", "2", "--min-nodes", "3", *OVERRIDES], "--min-nodes 3 is more than --nodes 2"),
        (["kubernetes", "name=a_b", SHARDS], "name=a_b is not a valid job name"),
        (["kubernetes", "head=clipp"], "did you mean clip"),
        (["slurm", *OVERRIDES], "one of train, sweep, search, eval before the overrides"),
        (["slurm", "train", "--min-nodes", "1", *OVERRIDES], "--min-nodes has no effect without --to torchrun"),
        (["slurm", "train", "head=clipp"], "did you mean clip"),
        (["slurm", "eval", "evall=demo"], "there is no key evall"),
        (["slurm", "sweep", SHARDS, "head=clip,clipp"], "did you mean clip"),
        (["slurm", "search", SHARDS, "seed=0,1"], "give --to slurm sweep"),
    ],
)
def test_a_launch_that_cannot_run_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        launch.main(["--to", *words])


SEARCH = ["head=wpse", SHARDS, "head.kernel.width=interval(0.25,2)", "search.sampler=tpe", "search.trials=9",
          "search.minimize=loss"]  # fmt: skip
SEEDS = [*OVERRIDES[1:], "seed=0,1"]
EVALUATION = ["run=runs/my run", "eval=demo"]
COMMANDS = [
    (["train", *OVERRIDES], ["train", *OVERRIDES], ""),
    (["sweep", "--at-once", "3", *SEEDS], ["launch", "--point", "1", *SEEDS], "0-1%3"),
    (["search", "--at-once", "3", *SEARCH], ["train", "-m", "search.launcher='srun --wait=120'", *SEARCH], "0-2"),
    (["eval", *EVALUATION], ["evaluate", *EVALUATION], ""),
]
"""Command line, arguments of clipzoo in the batch script, and the range of its array."""


@pytest.mark.parametrize(("words", "command", "array"), COMMANDS, ids=lambda words: words[0] if words else "")
def test_a_batch_script_asks_for_the_nodes_and_starts_the_command(words, command, array, capsys, tmp_path):
    launch.main(["--to", "slurm", *words, "--nodes", "4", "--gpus", "2"])
    script = capsys.readouterr().out
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", script, re.MULTILINE))
    asked = [options[name] for name in ("nodes", "gpus-per-node", "ntasks-per-node", "mem", "cpus-per-task")]
    assert asked == ["4", "2", "2", "64G", "8"] and options.get("array", "") == array
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "SLURM_ARRAY_TASK_ID": "1"}
    bash = ["bash", "-s", "seed=7"]
    done = subprocess.run(bash, input=script, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["-m", "clipzoo.distributed.launch", *command, "seed=7"]


@pytest.mark.parametrize("name", launch.SCRIPTS)
def test_batch_scripts_without_overrides_are_those_of_the_checkout_and_state_their_memory(name, capsys):
    launch.main(["--to", "slurm", name])
    script = capsys.readouterr().out
    assert script == (ROOT / "slurm" / f"{name}.sbatch").read_text()
    numbers = dict(re.findall(r"^#SBATCH --([\w-]+)=(\d+)", script, re.MULTILINE))
    assert int(numbers["mem"]) == launch.MEMORY * int(numbers["ntasks-per-node"])


def test_a_batch_script_for_the_cpu_asks_for_no_gpus(capsys):
    launch.main(["--to", "slurm", "train", *OVERRIDES, "trainer.device=cpu"])
    assert "#SBATCH --gpus-per-node=0\n#SBATCH --ntasks-per-node=8\n" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [["torchrun"], ["slurm", "train"]])
def test_a_file_that_is_there_is_not_overwritten_by_another_one(kind, tmp_path, capsys):
    file = tmp_path / "job"
    for _ in range(2):
        launch.main(["--to", *kind, "--output", str(file), *OVERRIDES])
    written = file.read_text()
    with pytest.raises(ConfigError, match="exists"):
        launch.main(["--to", *kind, "--output", str(file), *OVERRIDES, "seed=3"])
    assert file.read_text() == written and capsys.readouterr().out == f"{file}\n" * 2


@pytest.mark.slow
def test_the_script_of_torchrun_trains_on_two_hosts(tiny_shards, tmp_path, capsys):
    """Two processes of the same script, as two hosts would run it."""
    settings = overrides(tiny_shards, tmp_path, "objective=infonce", "name=run")
    rendezvous = ["--nodes", "2", "--gpus", "1", "--host", "127.0.0.1", "--port", str(free_port())]
    launch.main(["--to", "torchrun", *rendezvous, *settings])
    script = tmp_path / "run.sh"
    script.write_text(capsys.readouterr().out)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    hosts = [subprocess.Popen(["bash", str(script)], cwd=tmp_path, env=environment) for _ in range(2)]
    try:
        assert [host.wait(240) for host in hosts] == [0, 0]
    finally:
        for host in hosts:
            host.kill()
    assert len(losses(tmp_path)) == 9


def test_options_for_sbatch_may_have_the_names_of_own_options(tmp_path, monkeypatch, capfd):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/sh\nprintf "%s " "$@"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    launch.main(["--submit", "--sbatch", "--nodes=2 --time=1", "encoder=tiny", "data.shards=a.tar", "seed=0,1"])
    assert capfd.readouterr().out.startswith("--array=0-1 --nodes=2 --time=1 slurm/sweep.sbatch encoder=tiny ")
