"""Run directories written by somebody else: loading, evaluating and reporting them executes nothing they name.

Every hostile run tries to create a canary, a file beside it.
"""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

import clipzoo
from clipzoo.build import build_part
from clipzoo.cli.__main__ import main as clipzoo_command
from clipzoo.cli.evaluate import evaluate
from clipzoo.errors import ConfigError
from clipzoo.report.pages import write_report
from clipzoo.runs.directory import check_configuration
from clipzoo.training import checkpoint_files
from clipzoo.types import Part
from tests.support.evaluation_sets import config_of
from tests.support.hostile_models import Call, written_run
from tests.support.processes import run_script

Config = dict[str, Any]
WIDTHS = {"image_width": 32, "text_width": 32}
OWN_HEAD = "tests.support.own_parts.OwnHead"


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


def opening(canary: Path) -> Call:
    """Return a value that creates the canary when it is unpickled."""
    return Call(open, str(canary), "w")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with one checkpoint."""
    return written_run(tmp_path / "run").parents[1]


def write_config(folder: Path, config: Config) -> None:
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def touch(canary: Path) -> Config:
    """A node that creates the canary in a process."""
    return {"_target_": "subprocess.Popen", "args": ["touch", str(canary)]}


def written(canary: Path) -> Config:
    return {"_target_": "builtins.open", "_args_": [str(canary), "w"]}


REFUSALS = "is not a class of clipzoo|is not a part of clipzoo|is not the name of a class|cannot be imported"

NODES: dict[str, Callable[[Path], Config]] = {
    "a process": touch,
    "a process as positional arguments": lambda canary: {**touch(canary), "_args_": [], "shell": False},
    "a file opened for writing": written,
    "a folder": lambda canary: {"_target_": "os.makedirs", "name": str(canary)},
    "a copy": lambda canary: {"_target_": "shutil.copyfile", "src": "/etc/hostname", "dst": str(canary)},
    "code": lambda canary: {"_target_": "builtins.exec", "_args_": [f"open({str(canary)!r}, 'w')"]},
    "a partial": lambda canary: {"_target_": "functools.partial", "_args_": [written(canary)]},
    "a pickle read by numpy": lambda canary: {
        "_target_": "numpy.load", "file": str(canary.with_name("pickle")), "allow_pickle": True,
    },
    "a pickle read by torch": lambda canary: {
        "_target_": "torch.load", "f": str(canary.with_name("pickle")), "weights_only": False,
    },
    "Hydra's own builder": lambda canary: {"_target_": "hydra.utils.instantiate", "config": touch(canary)},
    "our shard copier": lambda canary: {
        "_target_": "clipzoo.data.locations.copy_location", "location": f"pipe:touch {canary}",
        "target": written(canary),
    },
    "our file writer": lambda canary: {
        "_target_": "clipzoo.io.write_whole", "path": {"_target_": "pathlib.Path", "_args_": [str(canary)]}, "text": "",
    },
    "our revision of git": lambda canary: {
        "_target_": "clipzoo.runs.record.subprocess.run", "_args_": [["touch", str(canary)]],
    },
    "an import of ours": lambda canary: {"_target_": "clipzoo.lab.studies.run.subprocess.Popen", **touch(canary)},
    "our importer": lambda canary: {"_target_": "clipzoo.build.import_module", "name": "payload"},
    "our builder": lambda canary: {"_target_": "clipzoo.build.build_part", "node": touch(canary)},
    "a class of ours that is no part": lambda canary: {
        "_target_": "clipzoo.data.faults.FaultLog", "samples": 1, "max_bad_fraction": written(canary),
    },
    "a module in the working directory": lambda canary: {"_target_": "payload.Payload"},
    "a path in place of a module": lambda canary: {"_target_": f"clipzoo.{canary.with_name('payload')}.Payload"},
    "a name from a resolver": lambda canary: {**touch(canary), "_target_": "${oc.decode:subprocess.Popen}"},
    "a partial object": lambda canary: {**touch(canary), "_partial_": True},
}  # fmt: skip
"""Nodes that would create the canary if they were built."""


@pytest.mark.medium
@pytest.mark.parametrize("name", NODES)
def test_a_run_that_names_what_is_no_part_is_refused(name, run, canary, monkeypatch):
    node = NODES[name](canary)
    canary.with_name("pickle").write_bytes(pickle.dumps(opening(canary)))
    canary.with_name("payload.py").write_text(f"open({str(canary)!r}, 'w')\nclass Payload: pass\n")
    monkeypatch.chdir(canary.parent)
    monkeypatch.syspath_prepend(str(canary.parent))
    plain = config_of("clip")
    places: list[Config] = [
        {"head": {**node, **WIDTHS}},
        {"encoder": {**node, **WIDTHS}},
        {"head": {**plain["head"], "temperature": node}},
        {"head": {**plain["head"], "temperature": [{"inner": [node]}]}},
        {"encoder": {**plain["encoder"], "tokenizer": node}},
        {"encoder": {**plain["encoder"], "tokenizer": node, "_recursive_": False}},
        {"encoder": {**plain["encoder"], "image_tower": {**plain["encoder"]["image_tower"], "_args_": [node]}}},
        {"head": {**node, **WIDTHS}, "trust": ["subprocess", "builtins", "os", "payload", "clipzoo"], "_trust_": True},
    ]
    for changes in places:
        write_config(run, {**plain, **changes})
        with pytest.raises(ConfigError, match=REFUSALS):
            clipzoo.load(run)
        assert not canary.exists()


@pytest.mark.medium
@pytest.mark.parametrize("part_name", ["head", "tokenizer"])
def test_evaluate_refuses_a_hostile_run_with_a_message_and_code_2(part_name, run, canary, tmp_path):
    plain = config_of("clip")
    node = touch(canary)
    plain.update({"head": node} if part_name == "head" else {"encoder": {**plain["encoder"], "tokenizer": node}})
    write_config(run, plain)
    process = run_script("clipzoo", "evaluate", f"run={run}", "device=cpu", log=tmp_path / "log", code=2)
    place = "head" if part_name == "head" else "encoder.tokenizer"
    assert (
        f"{place}._target_=subprocess.Popen is not a class of clipzoo: add trust=subprocess if you trust the package "
        "subprocess" in process.stderr
    )
    assert "Traceback" not in process.stderr and not canary.exists()


@pytest.mark.medium
@pytest.mark.parametrize(
    "changes", [{"eval": None}, {"eval": [1]}, {"seed": 1e30}, {"logger": 3}, {"row": [1]}, {"tune": "x"}]
)
def test_nodes_of_another_type_are_refused_by_every_command(run, changes, tmp_path, monkeypatch, capsys, caplog):
    ((key, value),) = changes.items()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (run / "results.json").write_text('{"metrics": {"zero_shot/shapes/top1": 5.0}}')
    shutil.copytree(run, tmp_path / "other")
    write_config(run, {**config_of("clip"), **changes})
    fault = f"{run}/config.yaml has {value!r} as {key}, not"
    with pytest.raises(ConfigError, match=re.escape(fault)):
        clipzoo.load(run)
    for command in (
        ["evaluate", f"run={run}", "device=cpu"],
        ["explore", str(run), "--images", str(tmp_path)],
        ["export", str(run), "--to", "hub", "--output", str(tmp_path / "exported")],
        ["index", str(run), "--images", str(tmp_path), "--output", str(tmp_path / "index")],
    ):
        monkeypatch.setattr("sys.argv", ["clipzoo", *command])
        with pytest.raises(SystemExit) as ended:
            clipzoo_command()
        errors = capsys.readouterr().err
        assert ended.value.code == 2 and errors.startswith(f"clipzoo: {fault}") and errors.count("\n") == 1
    # Pages need no configuration: they name the fault, and show the rest.
    for command in (["report", str(run)], ["compare", str(run), str(tmp_path / "other")]):
        monkeypatch.setattr("sys.argv", ["clipzoo", *command])
        with suppress(SystemExit):
            clipzoo_command()
        assert "traceback" not in capsys.readouterr().err.lower()
        assert any(fault in message for message in caplog.messages)
        caplog.clear()
    assert f"config.yaml has {value!r} as {key}" in (run / "report.md").read_text().replace("\\", "")


def test_parts_that_loading_does_not_need_are_never_built(run, canary):
    plain = config_of("clip")
    pipe = {**plain["data"], "shards": f"pipe:touch {canary}"}
    write_config(run, {**plain, **dict.fromkeys(("objective", "eval", "optim", "logger"), touch(canary)), "data": pipe})
    clipzoo.load(run)
    write_report(run)
    with pytest.raises(ConfigError, match="holds a run of another configuration"):
        check_configuration(run, config_of("clip"))
    assert not canary.exists()


def test_a_checkpoint_with_a_pickle_is_refused(run, canary):
    (path,) = (run / "checkpoints").glob("*.pt")
    for content in ({"model": {"weight": opening(canary)}}, opening(canary)):
        checkpoint_files.save(
            run / "checkpoints", 1, content if isinstance(content, dict) else {"model": content}, {}, 1
        )
        for place in (run, path):
            with pytest.raises(ConfigError, match=r"step_00000001\.pt is not a checkpoint of weights"):
                clipzoo.load(place)
    path.write_bytes(pickle.dumps(opening(canary), protocol=2))
    with pytest.raises(ConfigError, match=r"step_00000001\.pt is not a checkpoint of weights"):
        clipzoo.load(path)
    assert not canary.exists()


def test_every_class_of_the_shipped_configuration_is_a_part():
    for name in ("clip", "wpse", "kme", "cloob"):
        plain = config_of(name)
        for key in ("trainer", "head", "objective", "optim", "logger", "data", "eval", "encoder"):
            assert isinstance(build_part(plain[key]), (Part, nn.Module)), key


def test_a_users_own_class_needs_trust_when_its_run_is_loaded(run, tmp_path):
    plain = config_of("clip")
    plain["head"]["_target_"] = OWN_HEAD
    write_config(run, plain)
    with pytest.raises(ConfigError, match="add trust=tests if you trust the package tests"):
        clipzoo.load(run)
    for trust in ("tests", ["other", "tests.support"], OWN_HEAD):
        assert type(clipzoo.load(run, trust=trust).head).__name__ == "OwnHead"
    with pytest.raises(ConfigError, match="add trust=tests "):
        evaluate([f"run={run}", "device=cpu", "eval=none"])
    assert evaluate([f"run={run}", "device=cpu", "eval=none", "trust=tests"]) == {}
    assert evaluate([f"run={run}", "device=cpu", "eval=none", "trust=[other,tests]"]) == {}


@pytest.mark.parametrize(
    "command", ["export RUN --to hub --output out", "index RUN --images images --output out", "explore RUN"]
)
def test_a_command_with_options_asks_for_its_option_and_takes_it(command, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plain = config_of("clip")
    refused = {
        "oc.env": {"_target_": plain["head"]["_target_"], "max_scale": "${oc.decode:${oc.env:HOME}}"},
        "tests": {"_target_": OWN_HEAD},
    }
    for package, changes in refused.items():
        write_config(run, {**plain, "head": {**plain["head"], **changes}})
        words = command.replace("RUN", str(run)).split()
        for trust, is_asked in (((), True), (("--trust", package), False)):
            monkeypatch.setattr("sys.argv", ["clipzoo", *words, *trust])
            with pytest.raises(SystemExit) if is_asked else suppress(SystemExit):
                clipzoo_command()
            message = capsys.readouterr().err
            assert (f"add --trust {package} if you trust" in message) == is_asked and "trust=" not in message


def test_a_trusted_package_does_not_lend_its_trust_to_what_it_imports(run, canary):
    node = {"_target_": "tests.support.own_parts.Popen", "args": ["touch", str(canary)]}
    write_config(run, {**config_of("clip"), "head": {**node, **WIDTHS}})
    with pytest.raises(ConfigError, match="comes from subprocess: add trust=subprocess"):
        clipzoo.load(run, trust="tests")
    assert not canary.exists()
    with pytest.raises(ConfigError, match="trust must be the name of a package"):
        evaluate([f"run={run}", "trust=3"])


def test_a_run_cannot_ask_for_environment_variables_without_trust(run, monkeypatch):
    monkeypatch.setenv("CLIPZOO_SECRET", "49")
    plain = config_of("clip")
    plain["head"]["max_scale"] = "${oc.decode:${oc.env:CLIPZOO_SECRET}}"
    write_config(run, plain)
    for load in (lambda: clipzoo.load(run), lambda: evaluate([f"run={run}", "device=cpu", "eval=none"])):
        with pytest.raises(ConfigError, match="environment variables: add trust=oc.env if you trust") as caught:
            load()
        assert "49" not in str(caught.value).replace(str(run), "")
    assert clipzoo.load(run, trust="oc.env").head.score_range == (-49, 49)


@pytest.mark.medium
def test_trust_is_never_stored(tiny_shards, tmp_path):
    options = ["encoder=tiny", f"data.shards='{tiny_shards}'", "data.workers=0", "trainer.global_batch=16",
               "trainer.epochs=null", "trainer.steps=1", f"runs={tmp_path}", "name=run"]  # fmt: skip
    options += ["trainer.device=cpu", f"head._target_={OWN_HEAD}", "trust=other"]
    run_script("train.py", *options, log=tmp_path / "log")
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert "trust" not in config and config["head"]["_target_"] == OWN_HEAD
    # The same command finds its run.
    assert "is finished after 1 steps" in run_script("train.py", *options, log=tmp_path / "again").stderr
