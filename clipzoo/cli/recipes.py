"""Recipes that start one training on several machines: a script of torchrun, or a file for a scheduler.

Every recipe runs `torchrun -m clipzoo.cli train OVERRIDES` on each node; torchrun's rendezvous on the first node
assigns the ranks. All are elastic where the number of nodes has a minimum below its maximum. SLURM's batch scripts, in
slurm/, start the ranks without torchrun.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from clipzoo.config.compose import compose
from clipzoo.errors import ConfigError

NAME = re.compile("[a-z]([a-z0-9-]{0,51}[a-z0-9])?")
"""Names that Kubernetes allows, with room for the index of a pod."""
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Every start of the ranks gets a store of its own; see clipzoo/distributed/preemption.py."""


@dataclass(frozen=True)
class Launch:
    """Description of a training on several nodes.

    nodes, min_nodes: the training starts with `nodes` and continues with at least `min_nodes`. gpus: ranks of a
    node, one GPU each unless on_cpu. host: first node, for torchrun. gpu: name of the GPU, for SkyPilot. image:
    container with clipzoo. volume: claim that is mounted at /runs. variables: of the environment.
    """

    name: str
    overrides: tuple[str, ...]
    nodes: int
    min_nodes: int
    gpus: int
    max_restarts: int = 3
    host: str = "HOST"
    port: int = 29400
    gpu: str = "H100"
    image: str = "clipzoo:latest"
    volume: str = "runs"
    on_cpu: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {**OWN_STORE, **self.variables}

    @property
    def node_range(self) -> str:
        return str(self.nodes) if self.min_nodes == self.nodes else f"{self.min_nodes}:{self.nodes}"

    def torchrun(self, endpoint: str) -> list[str]:
        """Return the command of one node. endpoint: host:port of the rendezvous."""
        return [
            "torchrun", "--nnodes", self.node_range, "--nproc-per-node", str(self.gpus), "--max-restarts",
            str(self.max_restarts), "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", self.name,
            *self.train,
        ]  # fmt: skip

    @property
    def train(self) -> list[str]:
        return ["-m", "clipzoo.cli", "train", *self.overrides]


def torchrun(launch: Launch) -> str:
    """Return a script to run on every node."""
    variables = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in launch.environment.items())
    return (
        "#!/usr/bin/env bash\n"
        f"# {launch.name}: run this on each of {launch.node_range} nodes, with `runs` on a disk of all of them.\n"
        f"{variables}exec {shlex.join(launch.torchrun(f'{launch.host}:{launch.port}'))}\n"
    )


def kubernetes(launch: Launch) -> str:
    """Return a Job with one indexed pod a node, and the service that names the first one."""
    endpoint = f"{launch.name}-0.{launch.name}:{launch.port}"
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": launch.name},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": launch.name}},
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": launch.name},
        "spec": {
            "completionMode": "Indexed",
            "completions": launch.nodes,
            "parallelism": launch.nodes,
            "backoffLimit": launch.max_restarts * launch.nodes,
            "template": {
                "spec": {
                    **_pod(launch, launch.torchrun(endpoint)),
                    "subdomain": launch.name,
                    "restartPolicy": "OnFailure",
                }
            },
        },
    }
    return _yaml(service, job)


def pytorchjob(launch: Launch) -> str:
    """Return a PyTorchJob of Kubeflow's trainer, which passes torchrun's options in the environment."""
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": launch.name},
        "spec": {
            "nprocPerNode": str(launch.gpus),
            "elasticPolicy": {
                "rdzvBackend": "c10d",
                "minReplicas": launch.min_nodes,
                "maxReplicas": launch.nodes,
                "maxRestarts": launch.max_restarts,
            },
            "pytorchReplicaSpecs": {
                "Worker": {
                    "replicas": launch.nodes,
                    "restartPolicy": "OnFailure",
                    "template": {"spec": _pod(launch, ["torchrun", *launch.train], "pytorch")},
                }
            },
        },
    }
    return _yaml(job)


def skypilot(launch: Launch) -> str:
    """Return a task of SkyPilot; the nodes find each other by its variables."""
    words = launch.torchrun("FIRST")
    run = shlex.join(words).replace("FIRST", f'"$first:{launch.port}"', 1)
    task = {
        "name": launch.name,
        "num_nodes": launch.nodes,
        "resources": {"accelerators": f"{launch.gpu}:{launch.gpus}"} if not launch.on_cpu else {"cpus": "8+"},
        "envs": launch.environment,
        "workdir": ".",
        "setup": "pip install -e '.[fast]'\n",
        "run": f'first=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n{run}\n',
    }
    return _yaml(task)


RECIPES: Mapping[str, Callable[[Launch], str]] = {
    "torchrun": torchrun,
    "kubernetes": kubernetes,
    "pytorchjob": pytorchjob,
    "skypilot": skypilot,
}


def recipe(options: argparse.Namespace) -> str:
    """Return the file that starts the training of the overrides on several nodes."""
    plain = compose(list(options.overrides))
    nodes = options.nodes or 1
    minimum = options.min_nodes or nodes
    if minimum > nodes:
        raise ConfigError(f"--min-nodes {minimum} is more than --nodes {nodes}")
    name = (plain["name"] or "clipzoo").lower()
    if not NAME.fullmatch(name):
        raise ConfigError(f"name={plain['name']} is not a valid job name: use letters, digits and -, as in name=kme")
    launch = Launch(
        name, tuple(options.overrides), nodes, minimum, options.gpus or 8, options.max_restarts, options.host,
        options.port, options.gpu, options.image, options.volume, plain["trainer"]["device"] == "cpu",
    )  # fmt: skip
    return RECIPES[options.to](launch)


def _pod(launch: Launch, command: list[str], container: str = "train") -> dict[str, Any]:
    resources = {} if launch.on_cpu else {"resources": {"limits": {"nvidia.com/gpu": launch.gpus}}}
    return {
        "containers": [
            {
                "name": container,
                "image": launch.image,
                "command": command,
                "env": [{"name": name, "value": value} for name, value in launch.environment.items()],
                **resources,
                "volumeMounts": [
                    {"name": "runs", "mountPath": "/runs"},
                    {"name": "shared-memory", "mountPath": "/dev/shm"},
                ],
            }
        ],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": launch.volume}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such, and no line breaks into commands."""


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent)


def _yaml(*documents: Mapping[str, Any]) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=10_000)
