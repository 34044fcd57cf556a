"""Make what the parts `pages` and `lines` of record.py read, once, with the reference checkout.

python tests/unchanged/stored.py REFERENCE_CHECKOUT STORED_FOLDER

STORED_FOLDER/runs: run directories of all kinds without weights. tables: names of the papers' tables. lines.json:
command lines, drawn from the grammar of tests/support/mistakes.py; files: the files that they name. FOLDER in a command
line represents a copy of these files. Runs that exist are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.unchanged import inputs, processes
from tests.unchanged.cases import BASE, EVALUATED, VALIDATED, Case
from tests.unchanged.checkout import Checkout

TRAINED = {
    "seed_clip_0": "evaluated trainer.precision=float32",
    "seed_clip_1": "evaluated trainer.precision=float32 seed=1",
    "seed_clip_2": "evaluated trainer.precision=float32 seed=2",
    "seed_cloob_0": "evaluated trainer.precision=float32 head=cloob objective=infoloob",
    "seed_cloob_1": "evaluated trainer.precision=float32 head=cloob objective=infoloob seed=1",
    "draws": "head=wpse evaluated eval.draws=3 eval.every_epochs=2",
    "kme": "head=kme evaluated",
    "nuclr": "head=cosine objective=nuclr objective.frozen_epochs=1 evaluated",
    "peak": "evaluated optim.schedule.peak=0.005",
    "peak_high": "evaluated optim.schedule.peak=0.05",
    "short": "trainer.steps=5",
    "validated": f"{VALIDATED} trainer.best_metric=validation/loss average=ema average.half_life_steps=5",
    "tuned": "evaluated tune/image=lora tune/text=frozen eval.at_start=true",
    "spikes": "trainer.on_spike=report trainer.spike_threshold=1 trainer.spike_window=5 trainer.profile=[3,5]",
    "ranks": "2ranks head=wpse trainer.parallel=fsdp evaluated",
}
"""Name of a run -> overrides, as in cases.VARIANTS."""
METRICS = {
    "zero_shot/imagenet/top1": 17.25, "zero_shot/cifar10/top1": 51.5, "zero_shot/caltech101/top1": 60.125,
    "linear_probe/cifar10/top1": 82.5, "linear_probe/dtd/top1": 55.0, "retrieval/mscoco/image_to_text/R@1": 20.5,
    "retrieval/mscoco/text_to_image/R@1": 15.25, "retrieval/flickr30k/image_to_text/R@1": 40.0,
}  # fmt: skip
ROWS = {
    "row_wpse": ("wpse/cc3m_gaussian",), "row_wpse_clip": ("wpse/cc3m_clip",), "row_wpse_linear": ("wpse/cc3m_linear",),
    "row_wpse_imq": ("wpse/cc12m_imq",), "row_kme": ("kme/cc3m_kme",), "row_kme_10": ("kme/cc3m_kme_10",),
    "row_kme_clip": ("kme/cc12m_clip",), "row_cloob_0": ("cloob/cc3m_cloob",),
    "row_cloob_1": ("cloob/cc3m_cloob", "seed=1"), "row_cloob_clip_0": ("cloob/cc3m_clip",),
    "row_cloob_clip_1": ("cloob/cc3m_clip", "seed=1"), "row_cloob_changed": ("cloob/cc3m_cloob", "head.beta=10"),
    "row_cloob_infoloob": ("cloob/cc3m_infoloob",), "row_nuclr": ("nuclr/cc3m_nuclr",),
    "row_nuclr_dagger": ("nuclr/cc3m_nuclr_dagger",), "row_nuclr_sogclr": ("nuclr/cc12m_sogclr",),
    "row_nuclr_siglip": ("nuclr/cc3m_siglip",), "row_small_clip": ("cloob/cc3m_clip", "scale=demo"),
    "row_small_cloob": ("cloob/cc3m_cloob", "scale=demo"),
}  # fmt: skip
"""Name of a written run -> its experiment and overrides. Nothing is trained."""
LINES = 190
"""Number of lines that are drawn; those of scripts without a command of `clipzoo` are left out."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path)
    parser.add_argument("stored", type=Path)
    options = parser.parse_args()
    stored = options.stored.resolve()
    (stored / "runs").mkdir(parents=True, exist_ok=True)
    inputs.write(stored / "work")
    checkout = Checkout(options.reference.resolve(), stored / "work")
    for function, arguments in ((written_runs, (str(stored / "runs"),)), (write_lines, (str(stored),))):
        processes.call(checkout.path, function, *arguments, answer=stored / "answer.json")
    for name, text in TRAINED.items():
        if not (stored / "runs" / name).exists():
            train(checkout, name, text.split(), stored / "runs" / name)
            print(name, flush=True)
    return 0


def train(checkout: Checkout, name: str, words: list[str], folder: Path) -> None:
    evaluated = EVALUATED if "evaluated" in words else ()
    given = [word for word in words if word not in ("evaluated", "2ranks")]
    case = Case(name, (*BASE, *evaluated, *given, f"name={name}"), 2 if "2ranks" in words else 1)
    checkout.remove(case)
    codes = checkout.start(case).wait()
    assert codes == [0] * case.ranks, f"{name}: {codes}, see {checkout.work}/logs/{name}.0"
    (run,) = checkout.runs(case)
    for path in [*run.glob("report*"), *run.glob("checkpoints/*"), run / ".lock"]:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    os.replace(run, folder)


def written_runs(folder: str) -> None:
    """Write finished runs of the papers' rows, with the same metrics shifted from run to run."""
    from tests.support.paper_runs import write_run

    for number, (name, (experiment, *overrides)) in enumerate(ROWS.items()):
        target = Path(folder) / name
        if not target.exists():
            metrics = {key: value + number for key, value in METRICS.items()}
            run = write_run(Path(folder) / "written", experiment, metrics, *overrides, evaluations=3)
            os.replace(run, target)
    shutil.rmtree(Path(folder) / "written", ignore_errors=True)


def write_lines(stored: str) -> None:
    """Write wrong and right command lines with the files that they name, and the names of tables."""
    from clipzoo.report.published import table_names
    from tests.support import mistakes

    root = Path(stored)
    (root / "tables").write_text("\n".join(table_names()))
    if not (root / "lines.json").exists():
        shutil.rmtree(root / "files", ignore_errors=True)
        shutil.copytree(root / "work" / "shards", root / "files" / "shards")
        files = mistakes.write_files(root / "files" / "files", str(root / "files" / "shards" / "{00000..00002}.tar"))
        drawn = [*mistakes.preparations(files), *mistakes.right_lines(files), *mistakes.right_commands(files)]
        drawn += mistakes.lines(LINES, 34, files)
        words = {"train.py": ("train",), mistakes.COMMAND: ()}
        commands = [[*words[line.script], *line.arguments] for line in drawn if line.script in words]
        commands += [[name, "--help"] for name in ("report", "config", "compare", "export", "lab", "plan", "launch")]
        commands += [[], ["--help"], ["--version"], ["nosuch"], ["config", "nosuchword"], ["report", "--list"]]
        plain = [[word.replace(str(root / "files"), "FOLDER") for word in line] for line in commands]
        (root / "lines.json").write_text(json.dumps(plain, indent=1))


if __name__ == "__main__":
    sys.exit(main())
