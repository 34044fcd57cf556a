"""Compare methods on the demo dataset with one training budget: tables for docs/benchmarks/methods.md.

    python scripts/demo_tables.py heads          # every head, one seed
    python scripts/demo_tables.py methods        # heads, objectives, views, terms and teachers, three seeds
    python scripts/demo_tables.py methods --cost # seconds of their steps relative to the first row, one run at a time

Every row is an ordinary run in runs/tables, so that an interrupted table resumes. Runs use one thread each; as many run
at the same time as there are cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scipy.stats import t as student_t

from clipzoo.cli.arguments import Parser, number_in, run_main
from clipzoo.config.vocabulary import Count
from clipzoo.report.render import Table, markdown, text_table
from clipzoo.runs.record import MetricKey, RunRecord

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "tables"

FAST = "optim.schedule.peak=2e-3 optim.schedule.warmup_steps=50"
SLOW = "optim.schedule.peak=5e-4 optim.schedule.warmup_steps=400"
WPSE = f"head=wpse head.text_points=caption {SLOW}"
HOPFIELD = "head=cloob head.beta=20 head.inverse_temperature=14.3"
HEADS = {
    "CLIP": f"head=clip {FAST}",
    "CLIP, temperature fixed at 0.05": f"head=clip head.learnable_temperature=false head.temperature=0.05 {FAST}",
    "WPSE, Gaussian": f"{WPSE} head/kernel=gaussian",
    "WPSE, inverse multiquadric": f"{WPSE} head/kernel=imq",
    "WPSE, linear only": f"{WPSE} head.alpha=[1,0]",
    "WPSE, nonlinear only": f"{WPSE} head.alpha=[0,1]",
    "WPSE, positive weights": f"{WPSE} head.weights=positive",
    "KME-CLIP": f"head=kme head.text_points=caption {FAST}",
    "CLOOB (InfoLOOB)": f"{HOPFIELD} objective=infoloob {SLOW} optim.schedule.peak=3e-4",
    "inner product": f"head=inner_product {FAST}",
    "squared distance": f"head=distance {FAST}",
}
HEADS_BUDGET = "trainer.epochs=null trainer.steps=800 trainer.global_batch=128"
"""Learning rates: the demo's for heads of unit vectors, the paper's with a long warmup for WPSE, lower for CLOOB."""

TEMPERATURE = "objective.temperature=0.05"
TEACHER = "teacher.path=runs/tables/methods_clip__infonce_0"
METHODS = {
    "CLIP, InfoNCE": "",
    "SigLIP": "objective=siglip",
    "FastCLIP v0": f"method=fastclip objective.version=v0 {TEMPERATURE}",
    "FastCLIP v1": f"method=fastclip objective.version=v1 {TEMPERATURE}",
    "FastCLIP v2": f"method=fastclip objective.version=v2 {TEMPERATURE}",
    "FastCLIP v3": f"method=fastclip objective.version=v3 {TEMPERATURE}",
    "GloFND": f"method=glofnd objective.start=1 {TEMPERATURE}",
    "RINCE": "method=rince",
    "hardness weighting": f"method=hardness {TEMPERATURE}",
    "Sinkhorn contrast": "method=sinkhorn",
    "AmorLIP": "method=amorlip",
    "NeuCLIP": f"method=neuclip objective.prototypes=256 {TEMPERATURE}",
    "Matryoshka": "method=matryoshka",
    "equal captions ignored": "method=same_caption",
    "equal captions positive": "method=same_caption objective.same_caption=positive",
    "three captions, InfoNCE": "method=several_captions",
    "three captions, log of the sum": "method=several_captions objective.positives=log_sum",
    "three captions, each alone": "method=several_captions objective.positives=each_alone",
    "three captions, SigLIP": "method=several_captions objective=siglip",
    "NegCLIP": "method=negclip data.hard_key=hard",
    "FILIP": "method=filip",
    "FLAIR": "method=flair head.heads=4",
    "ProLIP": "method=prolip",
    "MERU": "method=meru",
    "HyCoCLIP": "method=hycoclip data.box_key=boxes",
    "distillation, open_clip": f"method=distill_open_clip {TEACHER}",
    "distillation, DataCompDR": f"method=datacomp_dr {TEACHER}",
    "distillation, CLIP-KD": f"method=clip_kd {TEACHER} distill.width=64 distill.teacher_width=64",
    "DRRho-CLIP": f"method=drrho {TEACHER} {TEMPERATURE}",
    "LLIP": "method=llip head.heads=4",
}
METHODS_BUDGET = (
    "data=views data.hard_key=null data.box_key=null data.group_key=null data.workers=0 "
    "eval.root=data/views/downstream eval.linear_probe=[] encoder.image_size=32 head.embed_width=64 "
    "trainer.epochs=null trainer.steps=250 trainer.global_batch=64 optim.schedule.peak=1e-3"
)
"""Scenes of 32 pixels with five captions: clipzoo world --root data/views --views --image-size 32 --train 8000."""
COST_BUDGET = "trainer.steps=60 eval=none"

COLUMNS = {
    "zero-shot shapes": "zero_shot/shapes/top1",
    "colours": "zero_shot/colours/top1",
    "counts": "zero_shot/counts/top1",
    "probe shapes": "linear_probe/shapes/before/top1",
    "image to text @1": "retrieval/scenes/image_to_text/recall_at_1",
    "text to image @1": "retrieval/scenes/text_to_image/recall_at_1",
}


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--seeds", type=number_in(Count), default=None, help="default: 1 for heads, 3 for methods")
    jobs = "runs at a time (default: number of cores)"
    parser.add_argument("--jobs", type=number_in(Count), default=os.cpu_count() or 1, help=jobs)
    parser.add_argument("--cost", action="store_true", help="measure steps instead of accuracies")
    options = parser.parse_args()
    methods, budget, seeds = TABLES[options.table]
    RUNS.mkdir(parents=True, exist_ok=True)
    if options.cost:
        turns = [
            {
                name: _run(f"cost_{options.table}", name, f"{budget} {overrides} {COST_BUDGET}", turn)
                for name, overrides in methods.items()
            }
            for turn in range(options.seeds or seeds)
        ]
        print(markdown(cost_table(turns)))
        return
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = {
            name: [
                pool.submit(_run, options.table, name, f"{budget} {overrides}", seed)
                for seed in range(options.seeds or seeds)
            ]
            for name, overrides in methods.items()
        }
        rows = {name: [RunRecord.read(future.result()) for future in futures] for name, futures in runs.items()}
    text = markdown(method_table(rows)) + "\n"
    (ROOT / "docs" / "benchmarks" / f"demo_{options.table}.md").write_text(text)
    print(text)


TABLES = {
    "heads": (HEADS, HEADS_BUDGET, 1),
    "methods": (METHODS, METHODS_BUDGET, 3),
}
"""Methods, budget and number of seeds."""


def method_table(runs: Mapping[str, Sequence[RunRecord]]) -> Table:
    """A row per method: mean and 95 % interval over seeds; memory of the first seed."""
    rows = []
    first = next(iter(runs.values()))[0]
    columns = {column: key for column, key in COLUMNS.items() if MetricKey.parse(key) in first.metrics}
    for name, records in runs.items():
        cells = [name]
        for key in map(MetricKey.parse, columns.values()):
            values = [record.metrics[key] for record in records]
            cells.append(f"{statistics.mean(values):.1f}")
            if (count := len(values)) > 1:
                cells[-1] += f" ± {student_t.ppf(0.975, count - 1) * statistics.stdev(values) / count**0.5:.1f}"
        rows.append([*cells, f"{float(records[0].training['peak_memory_mib']):.0f}"])
    return text_table(["method", *columns, "peak MiB"], rows, left=1)


def cost_table(turns: Sequence[Mapping[str, Path]]) -> Table:
    """A row per method: time of a step without loading data, and with it, over that of the first row in each turn."""
    ratios: dict[str, list[list[float]]] = {name: [] for name in turns[0]}
    for turn in turns:
        times = {name: _seconds(run) for name, run in turn.items()}
        first = next(iter(times.values()))
        for name, pair in times.items():
            ratios[name].append([one / other for one, other in zip(pair, first, strict=True)])
    rows = []
    for name, pairs in ratios.items():
        step, whole = zip(*pairs, strict=True)
        each = ", ".join(f"{ratio:.2f}" for ratio in step)
        rows.append([name, f"{statistics.median(step):.2f}", f"{statistics.median(whole):.2f}", each])
    return text_table(["method", "step", "with its data", "step in each turn"], rows, left=1)


def _seconds(run: Path) -> tuple[float, float]:
    """Return the median seconds of a step without loading data, and with it; the first step is left out."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "samples_per_second" in line][1:]
    whole = statistics.median(1 / line["samples_per_second"] for line in lines)
    return statistics.median((1 - line["data_wait"]) / line["samples_per_second"] for line in lines), whole


def _run(table: str, name: str, overrides: str, seed: int) -> Path:
    folder = "".join(letter if letter.isalnum() else "_" for letter in f"{table}_{name}_{seed}").lower()
    command = [sys.executable, "train.py", "experiment=demo/clip", f"name={folder}", f"runs={RUNS}", f"seed={seed}"]
    print(f"== {name}, seed {seed}", file=sys.stderr, flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (RUNS / f"{folder}.log").open("ab") as log:
        subprocess.run([*command, *overrides.split()], cwd=ROOT, env=environment, stdout=log, stderr=log, check=True)
    print(f"== {name}, seed {seed}: finished", file=sys.stderr, flush=True)
    return RUNS / folder


if __name__ == "__main__":
    run_main(main)
