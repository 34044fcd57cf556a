"""The folder of a study: figures, tables as CSV, and result.json, which is written last."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import asdict
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from PIL import Image

from clipzoo import io
from clipzoo.io.text import draw
from clipzoo.studies.framework.study import Drawing, Findings, Row, Study

RESULT = "result.json"
PALETTE = 128


def write_findings(
    folder: Path, study: Study, findings: Findings, settings: Mapping[str, Any], seconds: Mapping[str, float]
) -> dict[str, Any]:
    """Write <table>.csv, <figure>.png and result.json, each file atomically. Returns the content of result.json.

    seconds: duration of the study, wall time as "clock" and CPU time as "processor".
    """
    for name, rows in findings.tables.items():
        io.write_whole(folder / f"{name}.csv", _csv(rows))
    for name, drawing in findings.drawings.items():
        _write_png(folder / f"{name}.png", drawing)
    content = {
        **_description(study),
        "verdict": findings.verdict,
        "checks": [{**asdict(check), "error": check.error, "met": bool(check.met)} for check in findings.checks],
        "claims": [{**asdict(claim), "borne_out": bool(claim.borne_out)} for claim in findings.claims],
        "figures": {name: drawing.caption for name, drawing in findings.drawings.items()},
        "tables": {name: [dict(row) for row in rows] for name, rows in findings.tables.items()},
        "settings": dict(settings),
        "seconds": {kind: round(value) for kind, value in seconds.items()},
    }
    io.write_whole(folder / RESULT, json.dumps(content, indent=1, default=float))
    return content


def write_failure(folder: Path, reason: str) -> None:
    """Record that a study failed; the page then shows the reason instead of earlier figures."""
    io.write_json(folder / RESULT, {"failed": reason})


def read_result(folder: Path) -> dict[str, Any] | None:
    """Return the content of result.json; None without one, and with a warning for a damaged one."""
    path = folder / RESULT
    return (
        io.DamageLog().read(lambda: io.read_json(path, 16 * io.MB, "run the study again"), None)
        if path.exists()
        else None
    )


def _description(study: Study) -> dict[str, Any]:
    return {
        "title": study.title,
        "source": study.source,
        "question": study.question,
        "differs": list(study.differs),
    }


def _csv(rows: list[Row]) -> str:
    text = StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _short(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def _write_png(path: Path, drawing: Drawing) -> None:
    drawn = BytesIO()
    draw(drawing.figure, drawn, dpi=110)
    # A palette reduces the file to a third. Without matplotlib's metadata equal figures are equal files.
    with Image.open(drawn) as image, io.whole(path) as file:
        image.convert("RGB").quantize(PALETTE, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
