"""Run the papers' small experiments.

clipzoo studies                                     all studies, then the page docs/studies/README.md
clipzoo studies study=half_disc                     one study
clipzoo studies study=half_disc study.draws=5       change a setting
clipzoo studies folder=studies jobs=1               write to another folder, one study at a time
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from clipzoo import io
from clipzoo.config.compose import compose
from clipzoo.config.groups import CONF
from clipzoo.config.schema import kinds_of
from clipzoo.config.trust import trusted_names
from clipzoo.config.vocabulary import AnyNumber
from clipzoo.distributed.launch import exit_on_error, say
from clipzoo.errors import ConfigError
from clipzoo.io.text import draw, markdown_text
from clipzoo.runs.identity import with_variables

if TYPE_CHECKING:
    from clipzoo.lab.studies.framework import Findings, Study

INTERRUPTED = 130
"""Exit code after Ctrl-C."""
RESULT, REMEDY = "result.json", "run the study again"


@exit_on_error()
def main(arguments: list[str]) -> int:
    """Run the studies of the command line. Returns the exit code: 0, 1 if a study failed, 2 for a wrong argument."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        plain = with_variables(compose(arguments, "studies"))
        # The schema does not cover these values; no study runs before they are checked.
        known = sorted(path.stem for path in (CONF / "study").glob("*.yaml"))
        if unknown := [study for study in plain["studies"] if study not in known]:
            raise ConfigError(f"studies names {unknown[0]!r}, which is not one of: {', '.join(known)}")
        try:
            Path(plain["folder"]).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"folder={plain['folder']} cannot be created: {error.strerror}") from None
        name = next((text.removeprefix("study=") for text in arguments if text.startswith("study=")), None)
        if name is not None:
            return 0 if run_one(io.folder_name(name, "study"), plain, trusted_names(arguments)) else 1
        # Ending this process ends the studies that it starts.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        return 0 if run_all(plain) else 1
    except KeyboardInterrupt:
        say("clipzoo: interrupted; earlier results of the unfinished studies are unchanged")
        return INTERRUPTED


def run_one(name: str, plain: dict[str, Any], trust: Collection[str]) -> bool:
    """Run one study in this process and write its folder. Returns False if it failed."""
    import torch

    from clipzoo.build import build_part

    folder = Path(plain["folder"])
    study = build_part(plain["study"], trust)
    # The matrices are small: a second thread costs more than it gains, and another study may use the core.
    torch.set_num_threads(1)
    say(f"{name}: {study.title}; settings: conf/study/{name}.yaml, results: {folder / name}")
    began, used = time.perf_counter(), time.process_time()
    findings = None
    try:
        findings = study.run()
    except ConfigError:
        # A wrong setting is not a failure of the study: keep the record of an earlier run.
        raise
    except Exception as error:
        # The page names the failure of one study; the other studies continue.
        traceback.print_exc()
        write_failure(folder / name, f"{type(error).__name__}: {error}")
    else:
        settings = {key: value for key, value in plain["study"].items() if key != "_target_"}
        seconds = {"clock": time.perf_counter() - began, "processor": time.process_time() - used}
        write_findings(folder / name, study, findings, settings, seconds)
        say(f"{name}: {findings.verdict}")
    write_page(folder, plain["studies"])
    return findings is not None


def run_all(plain: dict[str, Any]) -> bool:
    """Run each study in its own process, `jobs` at a time. Returns False if one failed."""
    folder = Path(plain["folder"])
    processes: list[subprocess.Popen[bytes]] = []

    def run(name: str) -> bool:
        began = time.perf_counter()
        command = [sys.executable, "-m", "clipzoo.cli", "studies", f"study={name}", f"folder={folder}"]
        with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
            processes.append(process)
            code = process.wait()
        if code in (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM):
            return False
        if code == 2:
            write_failure(folder / name, f"it did not start: clipzoo studies study={name} shows the reason")
        elif code not in (0, 1):
            # The process ended without recording its failure.
            write_failure(folder / name, f"its process ended with code {code}")
        say(f"== {name}: {'done' if code == 0 else 'FAILED'} after {time.perf_counter() - began:.0f} s")
        return code == 0

    with ThreadPoolExecutor(plain["jobs"] or os.cpu_count()) as pool:
        try:
            done = list(pool.map(run, plain["studies"]))
        except KeyboardInterrupt:
            # Do not start the waiting studies; stop the running ones.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            raise
    say(f"page: {write_page(folder, plain['studies'])}")
    return all(done)


def write_findings(
    folder: Path, study: Study, findings: Findings, settings: Mapping[str, Any], seconds: Mapping[str, float]
) -> None:
    """Write <table>.csv, <figure>.png and result.json, each file atomically.

    seconds: duration of the study, wall time as "clock" and CPU time as "processor".
    """
    import pandas as pd

    for name, rows in findings.tables.items():
        formatted = [
            {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()} for row in rows
        ]
        io.write_whole(folder / f"{name}.csv", pd.DataFrame(formatted, dtype=object).to_csv(index=False))
    for name, (figure, _) in findings.drawings.items():
        drawn = BytesIO()
        draw(figure, drawn, dpi=110)
        # A palette reduces the file to a third. Without matplotlib's metadata equal figures are equal files.
        with Image.open(drawn) as image, io.whole(folder / f"{name}.png") as file:
            image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    content = {
        **{key: getattr(study, key) for key in ("title", "source", "question", "differs")},
        "verdict": findings.verdict,
        "checks": [{**asdict(check), "error": check.error, "met": bool(check.met)} for check in findings.checks],
        "claims": [{**asdict(claim), "borne_out": bool(claim.borne_out)} for claim in findings.claims],
        "figures": {name: caption for name, (_, caption) in findings.drawings.items()},
        "tables": findings.tables,
        "settings": settings,
        "seconds": {kind: round(value) for kind, value in seconds.items()},
    }
    io.write_whole(folder / RESULT, json.dumps(content, indent=1, default=float))


def write_failure(folder: Path, reason: str) -> None:
    """Record that a study failed; the page then shows the reason instead of earlier figures."""
    io.write_json(folder / RESULT, {"failed": reason})


def read_result(folder: Path) -> dict[str, Any] | None:
    """Return the content of result.json; None without one, and with a warning for a damaged one."""
    path = folder / RESULT
    return io.DamageLog().read(partial(_checked_result, path), None) if path.exists() else None


def _checked_result(path: Path) -> dict[str, Any]:
    content = io.read_json(path, 16 * io.MB, REMEDY)
    if "failed" in content:
        io.require_fields(path, content, kinds_of({"failed": str}), REMEDY)
        return content
    texts = dict.fromkeys(("title", "source", "question", "verdict"), str)
    lists = {"differs": list[str], "checks": list[Mapping], "claims": list[Mapping]}
    mappings = {"figures": dict[str, str], "tables": dict[str, list[Mapping]], "seconds": dict[str, AnyNumber]}
    io.require_fields(path, content, kinds_of({**texts, **lists, **mappings}), REMEDY)
    numbers = dict.fromkeys(("measured", "expected", "tolerance", "error"), AnyNumber)
    for check in content["checks"]:
        io.require_fields(path, check, kinds_of({"quantity": str, "relative": bool, "met": bool, **numbers}), REMEDY)
    for claim in content["claims"]:
        io.require_fields(path, claim, kinds_of({"says": str, "measured": str, "borne_out": bool}), REMEDY)
    io.require_fields(path, content["seconds"], kinds_of({"processor": AnyNumber, "clock": AnyNumber}), REMEDY)
    return content


def write_page(folder: Path, names: list[str]) -> Path:
    """Write README.md of the studies in `folder`: `names` first, in their order. Returns its path."""
    # These imports are slow, and `clipzoo studies --help` does not need them.
    from jinja2 import Template

    from clipzoo.report.render import TEMPLATES

    others = sorted(path.parent.name for path in folder.glob(f"*/{RESULT}") if path.parent.name not in names)
    read = {name: read_result(folder / name) for name in [*names, *others]}
    results = {name: result for name, result in read.items() if result is not None}
    template = Template((TEMPLATES / "studies.md.j2").read_text(), trim_blocks=True, keep_trailing_newline=True)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "README.md"
    io.write_whole(path, template.render(results=results, markdown_text=markdown_text))
    return path
