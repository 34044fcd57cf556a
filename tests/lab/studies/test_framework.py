"""Studies: their settings, their record, their page, and pairs in memory as training data."""

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from clipzoo.build import build_part
from clipzoo.config.compose import compose
from clipzoo.config.groups import CONF
from clipzoo.errors import ConfigError
from clipzoo.lab.studies.framework import Check, Claim, Findings, Study
from clipzoo.lab.studies.run import main, read_result, write_failure, write_findings, write_page

NAMES = sorted(path.stem for path in (CONF / "study").glob("*.yaml"))


class Example(Study):
    title, source, question = "An example", "a paper, section 1", "What is it?"

    def run(self) -> Findings:
        checks = [Check("one", 1.02, 1.0, 0.05, relative=True), Check("two", 2.5, 2.0, 0.1)]
        claims = [Claim("It rains.", "0 mm", borne_out=False)]
        tables = {"rain": [{"day": 1, "mm": 0.0}]}
        return Findings("It depends.", checks, claims, tables, {"picture": (Figure(), "A picture.")})


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A folder of studies with the results of one."""
    study = Example()
    write_findings(tmp_path / "example", study, study.run(), {"draws": 3}, {"clock": 130.0, "processor": 60.0})
    return tmp_path


@pytest.mark.medium
@pytest.mark.parametrize("name", NAMES)
def test_every_study_has_valid_settings_and_all_of_them_in_its_file(name: str) -> None:
    study = build_part(compose([f"study={name}"], "studies")["study"])
    assert isinstance(study, Study)
    assert not [field.name for field in dataclasses.fields(study) if field.default is not dataclasses.MISSING]


def test_the_page_lists_every_study_of_the_configuration() -> None:
    listed = compose([], "studies")["studies"]
    assert set(listed) <= set(NAMES)
    assert len(set(listed)) == len(listed)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("drawz=3", r"study\.drawz; did you mean study\.draws"),
        ("draws=0", r"study\.draws must be a whole number from 1 to 1000000000, not 0"),
    ],
)
def test_a_wrong_setting_is_named(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(["study=half_disc", f"study.{setting}"], "studies")


def test_a_check_is_met_within_its_tolerance_and_not_beyond() -> None:
    assert Check("", 103.0, 100.0, 0.03, relative=True).met
    assert not Check("", 103.1, 100.0, 0.03, relative=True).met
    assert Check("", -0.5, 0.0, 0.5).met
    assert not Check("", -0.51, 0.0, 0.5).met
    assert not Check("", float("nan"), 0.0, 1.0).met


def test_the_record_and_the_page_hold_met_unmet_and_failed_results(example: Path) -> None:
    result = read_result(example / "example")
    assert result is not None
    assert [check["met"] for check in result["checks"]] == [True, False]
    assert result["settings"] == {"draws": 3}
    assert list(csv.DictReader((example / "example/rain.csv").open())) == [{"day": "1", "mm": "0"}]
    assert (example / "example/picture.png").read_bytes().startswith(b"\x89PNG")
    assert not list((example / "example").glob(".*")), "temporary files are left"
    write_failure(example / "broken", "ValueError: no | such\nthing")
    text = write_page(example, ["broken", "example", "never_run"]).read_text()
    assert "| 1 of 2 | 0 of 1 | It depends. |" in text
    assert "| It rains. | 0 mm | **no** |" in text
    assert "| two | 2.5 | 2 | 0.5 | 0.1 | **no** |" in text
    assert "**failed**: ValueError: no \\| such thing" in text
    assert "never_run" not in text
    assert "CPU time 60 s, wall time 2.2 min" in text
    pictures = [line.split("](")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert pictures and all((example / picture).exists() for picture in pictures)


def test_a_study_that_fails_says_so_and_does_not_stop_the_others(tmp_path: Path) -> None:
    # With a single temperature the study has no second world to compare with.
    quick = ["study.draws=1", "study.nuclr_steps=2", "study.mini_steps=2", "study.iterations=2", "study.sizes=[5]"]
    assert main(["study=half_disc", *quick, "study.temperatures=[0.5]", f"folder={tmp_path}"]) == 1
    assert "failed" in json.loads((tmp_path / "half_disc/result.json").read_text())
    assert "**failed**" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("jobs=0", "jobs must be a whole number from 1 to 1000000000 or null, not 0"),
        ("studies=[rank,nothing]", "studies names 'nothing', which is not one of: digits, "),
        ("studies=rank", "studies must be a list, every value str, not 'rank'"),
        ("folder=null", "folder must be str, not None"),
        ("folder=/dev/null/studies", "folder=/dev/null/studies cannot be created: Not a directory"),
    ],
)
def test_invalid_studies_and_folders_are_refused_before_a_study_runs(override: str, message: str, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        main([override])
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith(f"clipzoo: {message}")


def test_a_setting_that_the_user_can_change_leaves_the_record_of_an_earlier_run(example: Path, capsys) -> None:
    (example / "example").rename(example / "digits")
    with pytest.raises(SystemExit) as left:
        main(["study=digits", f"study.mnist={example}/nowhere", f"folder={example}"])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert "nowhere does not contain MNIST" in said and "Traceback" not in said
    result = read_result(example / "digits")
    assert result is not None and result["verdict"] == "It depends."


@pytest.mark.slow
@pytest.mark.parametrize(("end", "number"), [(os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM)])
def test_interrupted_studies_neither_fail_nor_go_on_to_the_next(tmp_path: Path, end, number) -> None:
    words = ["studies", "studies=[half_disc,rates]", "jobs=1", f"folder={tmp_path}"]
    with subprocess.Popen(
        [sys.executable, "-m", "clipzoo.cli", *words],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell that runs the suite in the background lets its processes ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as studies:
        assert studies.stderr is not None
        said = studies.stderr.readline()
        # A terminal's Ctrl-C reaches all processes, a batch system's SIGTERM perhaps the first alone.
        end(studies.pid, number)
        said += studies.stderr.read()
    assert studies.returncode == 130
    assert "half_disc: Popularity" in said and "rates:" not in said and "Traceback" not in said
    assert read_result(tmp_path / "half_disc") is None and not (tmp_path / "rates").exists()
