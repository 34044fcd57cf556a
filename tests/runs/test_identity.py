"""The identity of a run: what of its configuration decides its result."""

from __future__ import annotations

from clipzoo.runs.identity import digest, identity
from clipzoo.runs.renamed import RENAMED, current
from tests.support.experiments import composed_once

TUNED = ("tune/image=frozen", "tune/text=frozen", "tune/image=lora", "tune.image.rate=0.1", "tune.head_steps=5")


def test_tuning_is_part_of_the_identity_and_its_defaults_leave_a_run_what_it_was():
    plain = composed_once("data.shards=a.tar")
    earlier = {key: value for key, value in plain.items() if key not in ("tune", "init")}
    assert identity(plain) == identity(earlier)
    names = {digest(composed_once("data.shards=a.tar", change)) for change in TUNED}
    assert len(names) == len(TUNED) and digest(plain) not in names


def test_a_run_keeps_its_identity_under_every_name_that_a_class_of_its_configuration_has_had():
    names = [
        "clipzoo.optim.AdamW",
        "clipzoo.training.optimizers.AdamW",
        composed_once("data.shards=a.tar")["optim"]["_target_"],
    ]
    configurations = [{"optim": {"_target_": name}} for name in names]
    assert len({digest(configuration) for configuration in configurations}) == 1
    assert {current(configuration)["optim"]["_target_"] for configuration in configurations} == {names[-1]}
    assert not set(RENAMED) & set(RENAMED.values())
