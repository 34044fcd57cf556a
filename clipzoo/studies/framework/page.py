"""The page of all studies, rendered from their result.json files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clipzoo.io import write_whole
from clipzoo.io.text import markdown_text
from clipzoo.studies.framework.record import RESULT, read_result

HEAD = """# The papers' small experiments

The experiments of the papers that need no large dataset, run on two CPU cores with this package's heads, objectives and
trainer. `make studies` runs all of them and writes this page; `clipzoo studies study=NAME` runs one, and
`study.KEY=VALUE` changes its settings (`conf/study/NAME.yaml`). Tolerances of closed forms are set in that file and the
criteria of claims in the code of the study, before anything is measured. The same settings give the same numbers on the
same machine. Times are those of the run shown here; wall time exceeds CPU time on a machine with other jobs.
"""


def write_page(folder: Path, names: list[str]) -> Path:
    """Write README.md of the studies in `folder`: `names` first, in their order. Returns its path."""
    others = sorted(path.parent.name for path in folder.glob(f"*/{RESULT}") if path.parent.name not in names)
    results = {name: read_result(folder / name) for name in [*names, *others]}
    present = {name: result for name, result in results.items() if result is not None}
    parts = [HEAD, _summary(present), *(_section(name, result) for name, result in present.items())]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "README.md"
    write_whole(path, "\n".join(parts))
    return path


def _summary(results: Mapping[str, dict[str, Any]]) -> str:
    lines = ["| study | closed forms met | claims borne out | verdict |", "| --- | --- | --- | --- |"]
    for name, result in results.items():
        if "failed" in result:
            lines.append(f"| [{name}](#{name}) | | | **failed**: {_line(result['failed'])} |")
            continue
        link = f"[{result['title']}](#{name})"
        met, borne_out = _count(result["checks"], "met"), _count(result["claims"], "borne_out")
        lines.append(f"| {link} | {met} | {borne_out} | {result['verdict']} |")
    return "\n".join(lines) + "\n"


def _section(name: str, result: Mapping[str, Any]) -> str:
    if "failed" in result:
        return f'<a id="{name}"></a>\n\n## {name}\n\n**This study failed**: {_line(result["failed"])}\n'
    lines = [f'<a id="{name}"></a>', "", f"## {result['title']}", ""]
    lines += [f"*{result['source']}.* {result['question']}", "", f"**Verdict.** {result['verdict']}", ""]
    for figure, caption in result["figures"].items():
        lines += [f"![{caption}]({name}/{figure}.png)", "", f"*{caption}*", ""]
    if result["claims"]:
        lines += ["| the paper says | measured | borne out |", "| --- | --- | --- |"]
        lines += [
            f"| {claim['says']} | {claim['measured']} | {'yes' if claim['borne_out'] else '**no**'} |"
            for claim in result["claims"]
        ]
        lines.append("")
    if result["checks"]:
        lines += [
            "| closed form | measured | expected | error | tolerance | met |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        lines += [_check_row(check) for check in result["checks"]]
        lines.append("")
    if result["differs"]:
        lines += [
            "Differences from the paper's setting:",
            "",
            *(f"- {difference}" for difference in result["differs"]),
            "",
        ]
    tables = ", ".join(f"[{table}.csv]({name}/{table}.csv)" for table in result["tables"])
    lines += [f"Numbers: {tables}, [{RESULT}]({name}/{RESULT}). `clipzoo studies study={name}`, "
              f"{_duration(result['seconds'])}.", ""]  # fmt: skip
    return "\n".join(lines)


def _check_row(check: Mapping[str, Any]) -> str:
    percent = check["relative"]
    error, tolerance = (
        f"{100 * check[key]:.3g} %" if percent else f"{check[key]:.3g}" for key in ("error", "tolerance")
    )
    numbers = f"{check['measured']:.4g} | {check['expected']:.4g}"
    return f"| {check['quantity']} | {numbers} | {error} | {tolerance} | {'yes' if check['met'] else '**no**'} |"


def _count(entries: list[Mapping[str, Any]], key: str) -> str:
    return f"{sum(entry[key] for entry in entries)} of {len(entries)}" if entries else ""


def _duration(seconds: Mapping[str, int]) -> str:
    clock, processor = (
        f"{value} s" if value < 100 else f"{value / 60:.1f} min" for value in (seconds["clock"], seconds["processor"])
    )
    return f"CPU time {processor}, wall time {clock}"


def _line(text: str) -> str:
    return markdown_text(" ".join(text.split()))
