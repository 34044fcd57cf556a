"""Environment variables and passwords: used by a run, never written by it."""

from __future__ import annotations

import json
import logging

import pytest
import yaml

import clipzoo
from clipzoo.config.compose import compose
from clipzoo.data.faults import Fault, FaultLog
from clipzoo.data.index import relative_names
from clipzoo.distributed.launch import say
from clipzoo.errors import ConfigError, masked
from clipzoo.runs.directory import run_folder
from clipzoo.runs.identity import identity, with_variables
from clipzoo.training.loggers import MaskingFormatter
from tests.support.processes import run_script
from tests.support.runs import overrides


@pytest.fixture(autouse=True)
def variables(monkeypatch) -> None:
    for name, value in {"TOKEN": "s3cr3t-value", "RATE": "0.25", "KIND": "bf16", "LIST": "[a.tar,b.tar]"}.items():
        monkeypatch.setenv(name, value)


def test_texts_keep_the_variable_and_other_values_are_resolved():
    plain = compose([
        "data.shards='/data/${oc.env:TOKEN}/{0..3}.tar'", "logger=wandb",
        "logger.also.wandb.entity=${oc.env:TOKEN}", "logger.also.wandb.group=${logger.also.wandb.entity}-x",
        "logger.also.wandb.project='${oc.env:NO_SUCH,\"a,b\"}'",
        "trainer.precision=${oc.env:KIND}", "trainer.clip_gradient='${oc.decode:${oc.env:RATE}}'",
        "optim.betas=[0.5,'${oc.decode:${oc.env:RATE}}']", "trainer.checkpoints.best_metric=null",
    ])  # fmt: skip
    assert plain["data"]["shards"] == "/data/${oc.env:TOKEN}/{0..3}.tar"
    wandb = plain["logger"]["also"]["wandb"]
    assert (wandb["entity"], wandb["group"]) == ("${oc.env:TOKEN}", "${oc.env:TOKEN}-x")
    trainer = plain["trainer"]
    assert (trainer["precision"], trainer["clip_gradient"], plain["optim"]["betas"]) == ("bf16", 0.25, [0.5, 0.25])
    values = with_variables(plain)
    assert values["data"]["shards"] == "/data/s3cr3t-value/{0..3}.tar"
    wandb = values["logger"]["also"]["wandb"]
    assert (wandb["group"], wandb["project"]) == ("s3cr3t-value-x", "a,b")


def test_a_list_from_a_variable_keeps_the_variable_and_a_missing_variable_is_named():
    plain = compose(["data.shards='${oc.decode:${oc.env:LIST}}'"])
    assert plain["data"]["shards"] == "${oc.decode:${oc.env:LIST}}"
    assert with_variables(plain)["data"]["shards"] == ["a.tar", "b.tar"]
    with pytest.raises(ConfigError, match="'NO_SUCH' not found"):
        compose(["data.shards='${oc.env:NO_SUCH}'"])


def test_a_wrong_value_from_a_variable_is_not_shown():
    with pytest.raises(ConfigError) as caught:
        compose(["data.shards=a.tar", "trainer.timeout=${oc.env:TOKEN}", "seed=${oc.env:TOKEN}"])
    assert "s3cr3t" not in str(caught.value) and "trainer.timeout must be" in str(caught.value)


def test_the_name_of_a_run_does_not_depend_on_secrets(monkeypatch):
    url = "https://user:{}@host/{{0..3}}.tar?X-Amz-Signature={}"
    names = set()

    def name(line: str) -> str:
        return run_folder(compose([line]), [line]).name

    for password in ("one", "two"):
        monkeypatch.setenv("TOKEN", password)
        names.add(name(f"data.shards='{url.format(password, password)}'"))
        names.add(name(f"data.shards='{url.format('${oc.env:TOKEN}', 'x')}'"))
    assert len(names) == 1
    assert identity(compose(["data.shards=a.tar"]))["data.shards"] == "a.tar"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://user:pass@host/a.tar", "s3://user:***@host/a.tar"),
        ("pipe:curl https://u:p@ss@host/a?x=1 | cat", "pipe:curl https://u:***@host/a?x=1 | cat"),
        ("https://ghp_abc@host/a", "https://***@host/a"),
        ("ssh://git@host/a", "ssh://git@host/a"),
        ("https://host/a?token=abc&x=1&X-Amz-Credential=d", "https://host/a?token=***&x=1&X-Amz-Credential=***"),
        ("https://host/a?sig=abc%3D#top", "https://host/a?sig=***#top"),
        ("https://host:8080/a@2/b?page=3", "https://host:8080/a@2/b?page=3"),
        ("https://host/{0..3}.tar?api_key=abc", "https://host/{0..3}.tar?api_key=***"),
        ("a:b@c", "a:b@c"),
    ],
)
def test_passwords_and_tokens_of_urls_are_masked(text, expected):
    assert masked({"key": [text, 3]}) == {"key": [expected, 3]}
    assert str(ConfigError(f"cannot read {text}")) == f"cannot read {expected}"


def test_a_token_is_no_part_of_a_shards_name():
    one, other = ([f"https://h/a/{number}.tar?token={token}" for number in range(2)] for token in "xy")
    assert relative_names(one) == relative_names(other)


def test_bad_samples_terminal_and_log_show_no_password(tmp_path, capsys):
    url = "https://u:hunter2@host/0.tar?token=hunter3"
    log = FaultLog(samples=100, max_bad_fraction=1.0)
    log.write_to(tmp_path / "bad.jsonl")
    log.record(100, [Fault(3, url, "key", "shard_missing", f"no {url}", f"{url} other")])
    say(f"opening {url}")
    formatter = MaskingFormatter("%(message)s")
    text = formatter.format(logging.LogRecord("clipzoo", logging.WARNING, "", 0, "shard %s", (url,), None))
    shown = (tmp_path / "bad.jsonl").read_text() + capsys.readouterr().err + text
    assert shown.count("https://u:***@host/0.tar?token=***") == 5 and "hunter" not in shown


@pytest.mark.medium
def test_a_run_writes_no_secret_and_the_same_command_resumes_it(tiny_shards, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDS", tiny_shards)
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    options = overrides("${oc.env:SHARDS}", tmp_path, "trainer.steps=3", "eval=none")
    options = [option for option in options if not option.startswith("runs=")]
    options += ["runs='${oc.env:RUNS}'", "logger=wandb", "logger.also.wandb.mode=disabled"]
    options += ["logger.also.wandb.entity='${oc.env:TOKEN}'", "logger.also.wandb.group='x-${oc.env:TOKEN}'"]
    options += ["logger.also.wandb.project='https://me:hunter2@host?token=hunter3'"]
    first = run_script("train.py", *options, log=tmp_path / "first")
    (run,) = (tmp_path / "runs").iterdir()
    # The value of a variable may change.
    monkeypatch.setenv("TOKEN", "an0ther-value")
    again = run_script("train.py", *options, log=tmp_path / "again")
    assert "is finished after 3 steps" in again.stderr and list((tmp_path / "runs").iterdir()) == [run]
    config = yaml.safe_load((run / "config.yaml").read_text())
    wandb = config["logger"]["also"]["wandb"]
    assert wandb["entity"] == "${oc.env:TOKEN}" and config["data"]["shards"] == "${oc.env:SHARDS}"
    assert wandb["project"] == "https://me:***@host?token=***"
    assert "logger.also.wandb.entity='${oc.env:TOKEN}'" in json.loads((run / "results.json").read_text())["overrides"]
    files = [path.read_bytes().decode(errors="replace") for path in run.rglob("*") if path.is_file()]
    text = "\n".join([*files, *(process.stdout + process.stderr for process in (first, again))])
    assert not any(secret in text for secret in ("s3cr3t", "an0ther", "hunter2", "hunter3"))
    clipzoo.load(run)


@pytest.mark.slow
def test_wandb_receives_no_secret(tiny_shards, tmp_path):
    options = overrides(tiny_shards, tmp_path, "name=run", "trainer.steps=2", "eval=none", "logger=wandb")
    options += ["logger.also.wandb.mode=offline", "logger.also.wandb.group='${oc.env:TOKEN}'"]
    options += ["data.cache_folder='https://me:hunter2@host'"]
    run_script("train.py", *options, log=tmp_path / "log")
    written = b"".join(path.read_bytes() for path in (tmp_path / "run" / "wandb").rglob("*") if path.is_file())
    assert b"me:***@host" in written and b"hunter2" not in written
