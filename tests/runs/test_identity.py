"""The identity of a run: what of its configuration decides its result."""

from __future__ import annotations

from clipzoo.runs.identity import digest, identity
from tests.support.experiments import composed_once

TUNED = ("tune/image=frozen", "tune/text=frozen", "tune/image=lora", "tune.image.rate=0.1", "tune.head_steps=5")


def test_tuning_is_part_of_the_identity_and_its_defaults_leave_a_run_what_it_was():
    plain = composed_once("data.shards=a.tar")
    earlier = {key: value for key, value in plain.items() if key not in ("tune", "init")}
    assert identity(plain) == identity(earlier)
    names = {digest(composed_once("data.shards=a.tar", change)) for change in TUNED}
    assert len(names) == len(TUNED) and digest(plain) not in names
