"""`clipzoo plan` on the command line."""

from __future__ import annotations

import pytest

from clipzoo.errors import ConfigError
from clipzoo.plan import plan
from tests.support.open_clip_models import small_model

SMALL = ["encoder=tiny", "head=clip", "--gpus", "8"]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("words", "expected", "chosen"),
    [
        (["trainer.global_batch=65536", "trainer.micro_batch=1024"], "as configured: ddp, micro-batch 1024",
         "choose: trainer.parallel=ddp trainer.micro_batch=null"),
        (["trainer.global_batch=64", "--memory", "0.03"], "does not fit", "choose: trainer.parallel=fsdp"),
    ],
)  # fmt: skip
def test_the_plan_chooses_the_simplest_setting_that_fits(words, expected, chosen, capsys):
    plan.main([*SMALL, *words])
    shown = capsys.readouterr().out
    assert expected in shown and chosen in shown


@pytest.mark.medium
def test_a_model_of_open_clip_is_planned_with_the_values_found_in_it(tmp_path, capsys):
    name, peer = small_model("ViT-B-32", tmp_path)
    plan.main(["encoder=open_clip", f"encoder.name={name}", "head=clip", "trainer.global_batch=64", "--gpus", "8"])
    parameters = sum(parameter.numel() for parameter in peer.parameters())
    assert f"{parameters:,} parameters" in capsys.readouterr().out


@pytest.mark.medium
def test_the_plan_offers_the_largest_micro_batch_that_fits_under_ddp(capsys):
    # 2048 pairs a GPU take .22 GB, of which the micro-batch changes one half; nine tenths of .2 GB may be filled.
    plan.main([*SMALL, "trainer.global_batch=16384", "--memory", "0.2"])
    rows = capsys.readouterr().out.splitlines()
    assert any(row.startswith("| ddp, micro-batch 1024 |") and "does not fit" not in row for row in rows)


def test_a_batch_that_the_gpus_cannot_share_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.global_batch=64 cannot be divided among 7 GPUs"):
        plan.main(["encoder=tiny", "trainer.global_batch=64", "--gpus", "7"])


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--gpu", "H1000"], "invalid choice"), (["--reached", "2"], "at most 1"), (["head=clipp"], "did you mean clip")],
)
def test_wrong_options_are_named(words, message):
    with pytest.raises(ConfigError, match=message):
        plan.main(words)
