"""By which protocol numbers were measured: what of `eval` changes them, for each task and set. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

FACTS = {
    "zero_shot": ("prompts", "interpolation"),
    "linear_probe": ("interpolation", "probe_resize", "probe_validation"),
    "retrieval": ("interpolation",),
}
TWO_LISTS = ("imagenet", "imagenet_v2", "imagenet_r")
"""Sets for which eval.prompts=slip and eval.prompts=clip are different prompts."""


def protocol(evaluation: Mapping[str, Any], metrics: Iterable[str]) -> dict[str, dict[str, Any]]:
    """evaluation: the configuration's `eval`. metrics: flat keys -> by "zero_shot/imagenet", what they rest on."""
    measured = dict.fromkeys("/".join(part.removesuffix("_paired") for part in key.split("/")[:2]) for key in metrics)
    found = {}
    for place in measured:
        task, _, name = place.partition("/")
        facts = {fact: evaluation[fact] for fact in FACTS.get(task, ()) if fact in evaluation}
        if facts.get("prompts") == "clip" and name not in TWO_LISTS:
            facts["prompts"] = "slip"
        if facts:
            found[place] = facts
    return found
