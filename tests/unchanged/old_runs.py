"""Check that run directories made by the reference code work with the current code.

python tests/unchanged/old_runs.py REFERENCE_CHECKOUT CURRENT_CHECKOUT OUTPUT_FOLDER [--only REGEX]

For each case: a run that was killed under the reference code is resumed by the current code to the same results; a
finished run is recognised as finished; clipzoo.load and scripts/evaluate.py give the same values. Prints the
differences and exits with 1 when there is any.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.unchanged import compare, inputs
from tests.unchanged.cases import BASE, EVALUATED, Case
from tests.unchanged.checkout import Checkout

CASES = (
    Case("clip", (*BASE, "head=clip", *EVALUATED)),
    Case("wpse", (*BASE, "head=wpse", "trainer.precision=float32")),
    Case("kme", (*BASE, "head=kme", "trainer.precision=bf16")),
    Case("cloob", (*BASE, "head=cloob", "objective=infoloob", "optim.schedule.restart_epochs=2")),
    Case("nuclr", (*BASE, "head=cosine", "objective=nuclr", "objective.frozen_epochs=0"), ranks=2),
    Case("isogclr", (*BASE, "head=cosine", "objective=isogclr", "trainer.micro_batch=3")),
    Case("mmd_conditional", (*BASE, "head=cosine", "objective=mmd_conditional")),
    Case("experiment", (*BASE, "experiment=wpse/cc3m_imq", "encoder=tiny", "eval=none", "name=given")),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path, help="checkout of the reference code")
    parser.add_argument("current", type=Path, help="checkout of the current code")
    parser.add_argument("output", type=Path, help="folder of the runs")
    parser.add_argument("--only", default="", help="regular expression searched in the names of cases")
    options = parser.parse_args()
    work = options.output.resolve() / "work"
    work.mkdir(parents=True, exist_ok=True)
    inputs.write(work)
    reference, current = Checkout(options.reference.resolve(), work), Checkout(options.current.resolve(), work)
    differences = []
    for case in CASES:
        if re.search(options.only, case.key):
            differing = list(check(case, reference, current))
            differences += differing
            print("\n".join([f"{case.key}: {len(differing)} differences", *differing]), flush=True)
    return int(bool(differences))


def check(case: Case, reference: Checkout, current: Checkout) -> Iterator[str]:
    """The differences between the current and the reference code on runs that the reference code made."""
    reference.kill(case)
    resumed = current.train(case)
    reference.remove(case)
    whole = reference.train(case)
    yield from compare.differences(f"{case.key}, killed and resumed", whole, resumed)
    if whole["exit"] != [0] * case.ranks:
        yield f"{case.key}: the reference code fails: {whole['message']}"
        return
    (run,) = reference.runs(case)
    yield from _finished(case, current, run)
    yield from compare.differences(f"{case.key}, loaded", reference.load(run), current.load(run))
    yield from compare.differences(f"{case.key}, evaluated", *(_evaluated(code, run) for code in (reference, current)))


def _finished(case: Case, current: Checkout, run: Path) -> Iterator[str]:
    """The same command says that the run is finished, and leaves its files as they are."""
    before = _files(run)
    program = current.start(case)
    codes = program.wait()
    if codes != [0] * case.ranks or "finished" not in program.output:
        yield f"{case.key}: a finished run is not recognised, exit codes {codes}:\n{program.output}"
    yield from compare.differences(f"{case.key}, asked again", before, _files(run))
    if current.runs(case) != [run]:
        yield f"{case.key}: {run.name} is finished, but the same command trained {current.runs(case)}"


def _files(run: Path) -> dict[str, str]:
    """Digests of the files that training writes."""
    paths = [run / "metrics.jsonl", run / "results.json", *sorted((run / "checkpoints").iterdir())]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _evaluated(code: Checkout, run: Path) -> dict[str, Any]:
    """The evaluation of a copy of the run."""
    copy = code.work / "runs" / "evaluated" / run.name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    return code.evaluate(copy)


if __name__ == "__main__":
    sys.exit(main())
