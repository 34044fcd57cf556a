"""`clipzoo evaluate` on a run, a checkpoint, and models of open_clip."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
import yaml

import clipzoo
from clipzoo.build import build_part
from clipzoo.cli.evaluate import _require_agreement, evaluate, main
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError, TrainingError
from clipzoo.runs.record import MetricKey, RunRecord
from clipzoo.training import checkpoint_files
from tests.support.evaluation_sets import config_of, model_of, write_sets
from tests.support.processes import start_script
from tests.support.two_view_models import write_two_view_model


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    write_sets(folder)
    return folder


@pytest.fixture
def settings(root) -> list[str]:
    return [
        "eval=none", f"eval.root={root}", "eval.zero_shot=[colours]", "eval.batch_size=16", "eval.workers=0",
        "device=cpu",
    ]  # fmt: skip


@pytest.fixture
def run(tmp_path) -> Path:
    """A run that was stopped after its second checkpoint."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config_of("clip")))
    for step, scale in ((1, 3.0), (2, 1.0)):
        model = model_of("clip").float()
        with torch.no_grad():
            model.head.text_projection.mul_(torch.linspace(1, scale, 16))
        checkpoint_files.save(folder / "checkpoints", step, {"model": model.state_dict()}, {"step": step}, 10)
    return folder


@pytest.mark.medium
def test_a_run_and_a_checkpoint_are_evaluated_each_with_results_of_its_own(run, settings):
    newest = evaluate([f"run={run}", *settings])
    assert json.loads((run / "evaluation" / "metrics.json").read_text()) == newest
    page = (run / "report.md").read_text()
    assert f"{newest['zero_shot/colours/top1']:.2f}" in page
    # Its presence would say that training has ended.
    assert not (run / "results.json").exists()
    first = evaluate([f"run={run}/checkpoints/step_00000001.pt", *settings])
    assert first.keys() == newest.keys() and first != newest
    assert json.loads((run / "step_00000001" / "results.json").read_text())["metrics"] == first
    assert json.loads((run / "evaluation" / "metrics.json").read_text()) == newest
    # The results of a finished run are updated.
    (run / "results.json").write_text(json.dumps({"row": None, "metrics": {"zero_shot/other/top1": 5.0}}))
    evaluate([f"run={run}", *settings, "eval.interpolation=bilinear"])
    results = json.loads((run / "results.json").read_text())
    assert results["metrics"].keys() == {"zero_shot/other/top1", *newest}
    # The protocol of the new numbers is recorded, so that a report distinguishes them from the row's.
    assert results["protocol"] == {"zero_shot/colours": {"prompts": "slip", "interpolation": "bilinear"}}
    evaluate([f"run={run}", *settings])
    assert json.loads((run / "results.json").read_text())["metrics"] == {"zero_shot/other/top1": 5.0, **newest}


def test_a_missing_run_or_checkpoint_is_named(run):
    gone = run / "checkpoints" / "step_00000099.pt"
    with pytest.raises(ConfigError, match="step_00000099.pt does not exist"):
        evaluate([f"run={gone}"])
    with pytest.raises(ConfigError, match="there is no checkpoint .*step_00000099.pt"):
        clipzoo.load(gone)
    with pytest.raises(ConfigError, match="there is no elsewhere/run/config.yaml"):
        clipzoo.load("elsewhere/run")


def test_a_checkpoint_of_another_model_is_one_message(run):
    path = checkpoint_files.save(run / "checkpoints", 3, {"model": {"x": torch.zeros(1)}}, {"step": 3}, 10)
    with pytest.raises(ConfigError, match="does not fit the model of its configuration .*: give another") as no:
        clipzoo.load(path)
    assert "\n" not in str(no.value)


@pytest.mark.medium
def test_a_file_of_open_clip_is_judged_as_the_run_it_was_made_from(run, settings, tmp_path):
    plain = config_of("clip", *(setting for setting in settings if not setting.startswith("device")))
    expected = build_part(plain["eval"]).run(clipzoo.load(run), tmp_path / "expected", World())
    clipzoo.export(clipzoo.load(run), tmp_path / "exported")
    output = tmp_path / "judged"
    asked = [*settings, "eval.zero_shot=[colours, food101]", "eval.missing=report", f"output={output}"]
    metrics = evaluate([f"model='local-dir:{tmp_path / 'exported'}'", "row=wpse/CC3M/CLIP", *asked])
    assert metrics == pytest.approx(expected)
    results = json.loads((output / "results.json").read_text())
    assert results["row"] == "wpse/CC3M/CLIP" and results["metrics"] == metrics
    page = (output / "report.md").read_text()
    assert "Compared with wpse/CC3M/CLIP" in page and "| Food-101 | missing | 13.05 |" in page
    assert "clipzoo evaluate " in page


@pytest.mark.medium
def test_measured_numbers_are_compared_with_published_ones_and_a_difference_above_the_interval_is_exit_code_1(
    run, settings, tmp_path, capsys
):
    clipzoo.export(clipzoo.load(run), tmp_path / "exported")
    file, output = tmp_path / "published.json", tmp_path / "judged"
    settings = [*settings, "eval.retrieval=[things]", f"output={output}", f"model='local-dir:{tmp_path / 'exported'}'"]
    top1, recall = "zero_shot/colours/top1", "retrieval/things/text_to_image/recall_at_5"
    metrics = evaluate(settings)
    assert "published" not in json.loads((output / "results.json").read_text())
    file.write_text(json.dumps({top1: metrics[top1] + 50, recall: metrics[recall], "zero_shot/other/top1": 3.0}))
    with pytest.raises(TrainingError, match=f"1 published number of 2 outside .*\n.*\n{top1} .* -50.00 ") as no:
        main([*settings, f"published={file}", "--expect"])
    assert no.value.exit_code == 1 and recall not in str(no.value)
    shown, page = capsys.readouterr().err, (output / "report.md").read_text()
    assert recall in shown and f"published by {file}" in shown
    assert "## Published numbers" in page and "**-50.00**" in page and f"Published by {file}" in page
    record = RunRecord.read(output)
    assert record.published.keys() == {top1, recall}
    assert [record.published[key]["difference"] for key in (top1, recall)] == pytest.approx([-50, 0])
    # The standard error of a share of 33 images.
    error = 100 * (metrics[top1] / 100 * (1 - metrics[top1] / 100) / 33) ** 0.5
    assert record.published[top1]["high"] - record.published[top1]["low"] == pytest.approx(2 * 1.96 * error, rel=0.15)
    # Metrics that are measured again lose their earlier comparison.
    again = record.evaluated({}, {MetricKey.parse(top1): 3.0}, output)
    assert again.published.keys() == {recall}
    _require_agreement(again.published)
    with pytest.raises(ConfigError, match="no evaluated dataset has a published number"):
        _require_agreement({})


@pytest.mark.medium
def test_a_model_of_transformers_in_half_precision_is_evaluated_in_float32_and_both_are_stated(
    settings, tmp_path, capsys
):
    pytest.importorskip("transformers")
    write_two_view_model("metaclip_2", tmp_path / "model", torch.float16)
    plain = [*settings, "eval.retrieval=[things]"]
    half = evaluate([f"model={tmp_path / 'model'}", *plain, f"output={tmp_path / 'half'}"])
    assert "evaluation: weights stored in float16, encoders compute in float32" in capsys.readouterr().err
    results = json.loads((tmp_path / "half" / "results.json").read_text())
    assert results["precision"] == {"weights": "float16", "encoders": "float32"} and results["metrics"] == half
    assert "weights float16, encoders float32" in (tmp_path / "half" / "report.md").read_text()
    # The same weights, stored in float32.
    clipzoo.export(clipzoo.load(f"transformers:{tmp_path / 'model'}"), tmp_path / "published", "hub")
    assert evaluate([f"model={tmp_path / 'published'}", *plain, f"output={tmp_path / 'float'}"]) == half


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "give one of run="),
        (["run=a", "model=b"], "give one of run="),
        (["run=clipzoo/evaluation/a.pt"], "is not a run: there is no clipzoo/evaluation/a.pt/config.yaml"),
        (["run=nowhere"], "run=nowhere is not a run"),
        (["model=ViT-B-32", "row=wpse/CC3M/CLAP"], "no paper has the row wpse/CC3M/CLAP; did you mean wpse/CC3M/CLIP"),
        (["model=no-such-model", "eval.drws=3"], "there is no key eval.drws; did you mean eval.draws"),
        (["run=a", "row=wpse/CC3M/CLIP"], "a run has its own row"),
        (["checkpoint=a.pt"], "there is no key checkpoint; did you mean run?"),
        (["model=RN50", "pretrained=cc12m", "expect=true", "eval=none"], "no evaluated dataset has a published number"),
        (["model=ViT-B-32", "published=ViT-B-32/openia"], "did you mean ViT-B-32/openai"),
        (["model=ViT-B-32", "published=nowhere.json"], "nowhere.json is missing"),
    ],
)
def test_an_invalid_evaluation_is_refused_before_anything_is_loaded(overrides, expected):
    with pytest.raises(ConfigError, match=expected):
        evaluate(overrides)


@pytest.mark.medium
def test_an_image_that_cannot_be_decoded_ends_the_command_with_its_name_and_without_worker_processes(
    run, settings, root, tmp_path
):
    shutil.copytree(root, tmp_path / "sets")
    (shard,) = (tmp_path / "sets" / "colours" / "test").glob("*.tar")
    with tarfile.open(shard) as archive:
        image = next(member for member in archive if member.name.endswith(("png", "webp", "jpg")))
    with shard.open("r+b") as file:
        file.seek(image.offset_data)
        file.write(bytes(image.size))
    changes = [f"eval.root={tmp_path / 'sets'}", "eval.workers=2"]
    process = start_script("clipzoo", "evaluate", f"run={run}", *settings, *changes, log=tmp_path / "log")
    assert process.wait() == 2, process.stderr
    assert "cannot be decoded" in process.stderr and "Traceback" not in process.stderr
