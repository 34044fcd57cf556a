"""Names that become folders."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from clipzoo.config.compose import compose
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.benchmarks import open_benchmark
from clipzoo.io import DamagedFileError, below, folder_name, require_no_links
from clipzoo.lab.studies.run import main as studies
from clipzoo.runs.directory import run_folder
from clipzoo.runs.remote import local_copy, runs_of
from tests.support.processes import run_script

INVALID = [
    "..", ".", "/abs", "../x", "a/b", "a\\b", "a\nb", "a\0b", "x" * 300, "é" * 100, "*", "-rf", ".hidden", " a", "a ",
    "a.", "a;b", "$HOME", "a`b", "a|b", "<b>", "a'b", "~", "\x1b[31m", "a\u2028b", "\u202eb",
]  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("name", INVALID)
def test_names_that_lead_elsewhere_are_refused_with_one_message(name, tmp_path):
    with pytest.raises(ConfigError, match="name=.* is not a valid folder name: give up to 150 letters") as caught:
        folder_name(name, "name")
    assert str(caught.value).isprintable()
    plain = {**compose(["data.shards=a.tar", "name=run"]), "name": name}
    with pytest.raises(ConfigError, match="is not a valid folder name"):
        run_folder(plain, [])
    with pytest.raises(ConfigError, match="evaluation dataset=.* is not a valid folder name"):
        open_benchmark(name, tmp_path, "slip")


@pytest.mark.parametrize("name", ["run", "cc3m lr=1e-3,wd=0.1", "2026-11-22_10:30", "épreuve (2)", "a.b+c@50%", "_x"])
def test_ordinary_names_are_kept(name):
    assert folder_name(name, "name") == name


@pytest.mark.slow
def test_a_name_that_leaves_the_runs_is_refused_before_anything_is_written(tmp_path):
    runs = tmp_path / "runs"
    process = run_script("train.py", "data.shards=a.tar", f"runs={runs}", "name=../x", log=tmp_path / "log", code=2)
    assert process.stderr.startswith("clipzoo: name='../x' is not a valid folder name")
    assert len(process.stderr.splitlines()) == 1 and not runs.exists() and not (tmp_path / "x").exists()


def test_an_unknown_study_does_not_leave_the_folder(tmp_path):
    with pytest.raises(SystemExit):
        studies(["study=../study/rank", f"folder={tmp_path / 'studies'}"])
    assert not list(Path(tmp_path).rglob("*.json"))


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd", "runs//home/x", "a/", "", "..", "a/../b", ".", "a/./b", ".ssh/authorized_keys", "a/.lock",
        "a\0b", "a\nb", "\udcff", "x" * 151, "a/" * 2500 + "a", 7, None, ["a"],
    ],
)  # fmt: skip
def test_a_name_that_leads_elsewhere_has_no_path(name, tmp_path):
    with pytest.raises(DamagedFileError, match="cannot hold a file called"):
        below(tmp_path, name)


def test_a_name_leads_below_its_folder_and_never_through_a_link_out_of_it(tmp_path):
    run = tmp_path / "run"
    (run / "report").mkdir(parents=True)
    assert below(run, "report/training curves é.png") == run / "report" / "training curves é.png"
    (run / "inside").symlink_to(run / "report")
    assert below(run, "inside/a.png") == run / "inside/a.png"
    (run / "outside").symlink_to(tmp_path)
    with pytest.raises(DamagedFileError, match="a link that leads out of the folder"):
        below(run, "outside/a.png")
    assert below(run, "outside/a.png", links=True) == run / "outside/a.png"


def test_a_link_out_of_a_directory_is_found_at_every_depth(tmp_path):
    run = tmp_path / "run"
    (run / "evaluation" / "zero_shot").mkdir(parents=True)
    (run / "inside").symlink_to(run / "evaluation")
    require_no_links(run)
    (run / "evaluation" / "zero_shot" / "set.npz").symlink_to("/etc/passwd")
    with pytest.raises(DamagedFileError, match="set.npz is a link to /etc/passwd, outside the directory"):
        require_no_links(run)
    require_no_links(run, Path("/etc"))


class HostileStore(MemoryFileSystem):
    """A store whose keys lead out of the folder of the run."""

    protocol = "hostile"
    keys = ("demo//home/x/.ssh/authorized_keys", "demo/config.yaml")

    def find(self, path, *args, **kwargs):
        return {f"{path.rstrip('/')}/{key.partition('/')[2]}": {"size": 6} for key in self.keys}

    def info(self, path, **kwargs):
        return {"size": 6, "name": path, "type": "file"}

    def cat_file(self, path, *args, **kwargs):
        return b"content"[:6]


def test_keys_of_a_store_that_lead_out_of_the_folder_are_refused(tmp_path, monkeypatch):
    fsspec.register_implementation("hostile", HostileStore, clobber=True)
    monkeypatch.setenv("CLIPZOO_STAGING", str(tmp_path / "staging"))
    with pytest.raises(ConfigError, match="cannot hold a file called '/home/x/.ssh/authorized_keys'"):
        local_copy("hostile://bucket/demo", "run")
    assert not [path for path in tmp_path.rglob("authorized_keys")]


@pytest.mark.parametrize("url", ["s3://", "s3:/bucket", "file://", "hf:///", "nosuch://bucket/runs", "s3://?x"])
def test_a_malformed_url_is_no_folder(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is not the URL of a store"):
        runs_of({"runs": url, "upload_patience": 1.0, "upload_every": 1.0})
    assert not list(tmp_path.iterdir())
