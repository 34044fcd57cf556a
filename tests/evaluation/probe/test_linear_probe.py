"""The linear probe of a dataset: what it reports and writes."""

from __future__ import annotations

import json
from functools import partialmethod

import pytest

from clipzoo.build import build_part
from clipzoo.distributed.world import World
from clipzoo.evaluation.logistic import LogisticRegression
from clipzoo.report.pages import write_report
from clipzoo.runs.record import RunRecord, results
from tests.support.evaluation_sets import IMAGE_SIZE, config_of, model_of, write_sets


@pytest.fixture
def evaluated(tmp_path):
    """Evaluate a small model by a linear probe and write the results; return the run directory."""
    write_sets(tmp_path / "datasets")
    plain = config_of(
        "clip", f"eval.root={tmp_path / 'datasets'}", "eval.linear_probe=[colours]", f"eval.image_size={IMAGE_SIZE}",
        "eval.batch_size=8", "eval.workers=0",
    )  # fmt: skip

    def evaluate():
        folder = tmp_path / "run"
        metrics = build_part(plain["eval"]).run(model_of("clip"), folder / "evaluation", World())
        results(folder, plain, None, [], {"steps": 1}, metrics).write(folder)
        write_report(folder)
        return folder

    return evaluate


@pytest.mark.medium
def test_a_final_fit_that_does_not_converge_is_named_in_the_log_the_results_and_the_report(
    evaluated, monkeypatch, capsys
):
    monkeypatch.setattr(LogisticRegression, "solve", partialmethod(LogisticRegression.solve, limit=1))
    folder = evaluated()
    names = ["linear_probe/colours/before", "linear_probe/colours/after"]
    assert json.loads((folder / "results.json").read_text())["not_converged"] == names
    assert RunRecord.read(folder).not_converged == tuple(names)
    assert all(f"`{name}`" in (folder / "report.md").read_text() for name in names)
    log = capsys.readouterr().err
    for projection in ("before", "after"):
        assert f"probe of colours, {projection} projection: the final fit at C=" in log
    assert "did not converge in 1 iteration; its accuracy is approximate" in log


@pytest.mark.medium
def test_the_results_of_converged_fits_do_not_mention_convergence(evaluated, capsys):
    folder = evaluated()
    assert "not_converged" not in json.loads((folder / "results.json").read_text())
    assert RunRecord.read(folder).not_converged == ()
    assert "converge" not in capsys.readouterr().err + (folder / "report.md").read_text()
