"""Write docs/compatibility.md: which objective trains which head, asked of the parts that conf/ describes.

python scripts/compatibility.py            write the page
python scripts/compatibility.py --check    exit with 1 when the page is not what would be written
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from clipzoo import build
from clipzoo.config.groups import CONF
from clipzoo.heads.base import Head
from clipzoo.objectives.base import Objective
from clipzoo.objectives.compatibility import Verdict, check_pair

PAGE = CONF.parent / "docs" / "compatibility.md"
ENCODER = {"image_width": 8, "text_width": 8}
"""Facts do not depend on the encoder; heads are built for a small one."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    asked = parser.parse_args()
    text = page(verdicts())
    if asked.check:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


def verdicts() -> dict[tuple[str, str], Verdict]:
    """(objective, head) -> the verdict on the two as conf/objective and conf/head describe them."""
    heads = {name: build_head(name) for name in options("head")}
    objectives = {name: build_objective(name) for name in options("objective")}
    return {
        (objective_name, head_name): check_pair(head, objective)
        for objective_name, objective in objectives.items()
        for head_name, head in heads.items()
    }


def options(group: str) -> list[str]:
    """The options of a configuration group, sorted."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if not path.stem.startswith("_"))


def build_head(name: str, *overrides: str) -> Head:
    return build.build_head(composed(f"+head={name}", *overrides))


def build_objective(name: str, *overrides: str) -> Objective:
    return build.build_objective(composed(f"+objective={name}", *overrides))


def page(found: Mapping[tuple[str, str], Verdict]) -> str:
    heads = list(dict.fromkeys(head for _, head in found))
    objectives = list(dict.fromkeys(objective for objective, _ in found))
    lines = [
        "# Which objective trains which head",
        "",
        "Written by `python scripts/compatibility.py` from the facts that heads and objectives state; a test keeps it",
        "true. The parts are those of `conf/head` and `conf/objective` without overrides; `train.py` asks the same",
        "question of the configuration that it is given, before anything slow, and names every reason at once.",
        "",
        "**yes**: a paper trained this pair. *yes*: sound, in none of the papers, runs with a warning. no: refused.",
        "",
        "| objective | " + " | ".join(heads) + " |",
        "| --- |" + " --- |" * len(heads),
    ]
    for objective in objectives:
        cells = [_cell(found[objective, head]) for head in heads]
        lines.append(f"| {objective} | " + " | ".join(cells) + " |")
    lines += ["", "## Why not", "", *_grouped(found, lambda verdict: verdict.reasons)]
    others = _grouped(found, lambda verdict: [each for each in verdict.warnings if not _unpublished(each)])
    lines += ["", '## Warnings beyond "unpublished"', "", *others]
    return "\n".join(lines) + "\n"


def _grouped(found: Mapping[tuple[str, str], Verdict], choose: Callable[[Verdict], Iterable[str]]) -> list[str]:
    """A line for each sentence about a head, with all the objectives that it is said of."""
    objectives: dict[tuple[str, str], list[str]] = {}
    for (objective, head), verdict in found.items():
        for sentence in choose(verdict):
            general = sentence.replace(f"objective {objective} ", "the objective ")
            objectives.setdefault((head, general), []).append(f"`{objective}`")
    return [f"- `head={head}` with {', '.join(names)}: {text}" for (head, text), names in sorted(objectives.items())]


def _cell(verdict: Verdict) -> str:
    if not verdict.legal:
        return "no"
    return "*yes*" if any(_unpublished(each) for each in verdict.warnings) else "**yes**"


def _unpublished(warning: str) -> bool:
    return warning.endswith("(sound, unpublished)")


def composed(*overrides: str) -> dict[str, Any]:
    """Parts of a configuration alone, resolved for a small encoder."""
    encoder = ",".join(f"{key}:{value}" for key, value in ENCODER.items())
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(None, ["+seed=0", f"+encoder={{{encoder}}}", *overrides])
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


if __name__ == "__main__":
    sys.exit(main())
