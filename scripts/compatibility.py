"""Write docs/reference/compatibility.md: which objectives can train which heads, for the heads and objectives of conf/.

python scripts/compatibility.py            write the page
python scripts/compatibility.py --check    write nothing; exit with 1 if the page is out of date
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from clipzoo import build
from clipzoo.cli.arguments import Parser, run_main
from clipzoo.config.groups import CONF
from clipzoo.heads.base import Head
from clipzoo.objectives.base import Compatibility, Objective, check_pair

PAGE = CONF.parent / "docs" / "reference" / "compatibility.md"
ENCODER = {"image_width": 8, "text_width": 8}
"""Compatibility does not depend on the encoder; heads are built for a small one."""


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    text = page(all_pairs())
    if options.check:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


def all_pairs() -> dict[tuple[str, str], Compatibility]:
    """Return the compatibility of every (objective, head) of conf/objective and conf/head."""
    heads = {name: build_head(name) for name in config_names("head")}
    objectives = {name: build_objective(name) for name in config_names("objective")}
    return {
        (objective_name, head_name): check_pair(head, objective)
        for objective_name, objective in objectives.items()
        for head_name, head in heads.items()
    }


def config_names(group: str) -> list[str]:
    """Return the sorted names of a configuration group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if not path.stem.startswith("_"))


def build_head(name: str, *overrides: str) -> Head:
    return build.build_head(composed(f"+head={name}", *overrides))


def build_objective(name: str, *overrides: str) -> Objective:
    return build.build_objective(composed(f"+objective={name}", *overrides))


def page(pairs: Mapping[tuple[str, str], Compatibility]) -> str:
    """Return the Markdown page for the compatibility of (objective, head) pairs."""
    heads = list(dict.fromkeys(head for _, head in pairs))
    objectives = list(dict.fromkeys(objective for objective, _ in pairs))
    marks = {True: "**yes**", False: "*yes*"}
    rows = [
        [objective, *(marks[pair.published] if (pair := pairs[objective, head]).compatible else "no" for head in heads)]
        for objective in objectives
    ]
    table = [["objective", *heads], ["---"] * (1 + len(heads)), *rows]
    lines = [
        "# Compatibility of heads and objectives",
        "",
        "Written by `python scripts/compatibility.py` from the attributes that heads and objectives declare; a test",
        "compares page and code. Heads and objectives are those of `conf/head` and `conf/objective` without overrides.",
        "`train.py` makes the same check for its configuration at the start and reports all reasons at once.",
        "",
        "**yes**: a paper trains this pair. *yes*: compatible, but in none of the papers; trains with a warning.",
        "no: refused with the reasons below.",
        "",
        *(f"| {' | '.join(row)} |" for row in table),
    ]
    for title, messages in (
        ("Reasons", {key: pair.reasons for key, pair in pairs.items()}),
        ("Warnings about compatible pairs", {key: pair.warnings for key, pair in pairs.items()}),
    ):
        # One line for each message about a head, with all objectives that it applies to.
        grouped: dict[tuple[str, str], list[str]] = {}
        for (objective, head), texts in messages.items():
            for text in texts:
                general = text.replace(f"objective {objective} ", "the objective ")
                grouped.setdefault((head, general), []).append(f"`{objective}`")
        lines += ["", f"## {title}", ""]
        lines += [f"- `head={head}` with {', '.join(names)}: {text}" for (head, text), names in sorted(grouped.items())]
    return "\n".join(lines) + "\n"


def composed(*overrides: str) -> dict[str, Any]:
    """Return the resolved configuration of the groups in `overrides`, with a small encoder."""
    encoder = ",".join(f"{key}:{value}" for key, value in ENCODER.items())
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(None, ["+seed=0", f"+encoder={{{encoder}}}", *overrides])
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


if __name__ == "__main__":
    run_main(main)
