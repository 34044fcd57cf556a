"""Methods side by side on the generated world, the same budget for each: tables for docs/benchmarks.md.

    python scripts/demo_tables.py heads          # every head, one seed
    python scripts/demo_tables.py objectives     # Hopfield, InfoLOOB, NUCLR, SogCLR, InfoNCE at batch 64, three seeds

Every row is an ordinary run of train.py under runs/tables, so that a table stopped half-way goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "tables"

HEADS = {
    "CLIP": "head=clip",
    "CLIP, temperature fixed at 0.05": "head=clip head.learnable_temperature=false head.temperature=0.05",
    "WPSE, Gaussian": "head=wpse head/kernel=gaussian head.text_points=caption",
    "WPSE, inverse multiquadric": "head=wpse head/kernel=imq head.text_points=caption",
    "WPSE, linear only": "head=wpse head.alpha=[1,0] head.text_points=caption",
    "KME-CLIP": "head=kme head.text_points=caption",
    "CLOOB (InfoLOOB)": "head=cloob objective=infoloob",
    "inner product": "head=inner_product",
    "squared distance": "head=distance",
}
HEADS_BUDGET = "trainer.epochs=null trainer.steps=500 trainer.global_batch=128"

OBJECTIVES = {
    "InfoNCE, learnable temperature": "head=clip objective=infonce",
    "InfoNCE with Hopfield": "head=cloob objective=infonce",
    "InfoLOOB without Hopfield": "head=cloob head.hopfield=false objective=infoloob",
    "InfoLOOB with Hopfield (CLOOB)": "head=cloob objective=infoloob",
    "SogCLR": "head=cosine objective=sogclr objective.temperature=0.05",
    "NUCLR": "head=cosine objective=nuclr objective.temperature=0.05 objective.frozen_epochs=2",
}
OBJECTIVES_BUDGET = (
    "data.shards='data/demo/train/{00000..00004}.tar' trainer.epochs=null trainer.steps=600 trainer.global_batch=64"
)
COLUMNS = {
    "zero-shot shapes": "zero_shot/shapes/top1",
    "colours": "zero_shot/colours/top1",
    "counts": "zero_shot/counts/top1",
    "probe shapes": "linear_probe/shapes/before/top1",
    "image to text @1": "retrieval/scenes/image_to_text/recall_at_1",
    "text to image @1": "retrieval/scenes/text_to_image/recall_at_1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("heads", "objectives"))
    parser.add_argument("--seeds", type=int, default=None, help="default: 1 for heads, 3 for objectives")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    methods, budget = (HEADS, HEADS_BUDGET) if options.table == "heads" else (OBJECTIVES, OBJECTIVES_BUDGET)
    seeds = options.seeds or (1 if options.table == "heads" else 3)
    rows = {
        name: [_run(options.table, name, f"{budget} {overrides}", seed, options.threads) for seed in range(seeds)]
        for name, overrides in methods.items()
    }
    text = markdown(rows)
    folder = ROOT / "docs" / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"demo_{options.table}.md").write_text(text)
    print(text)


def markdown(rows: dict[str, list[dict]]) -> str:
    """A row a method: mean over the seeds and, for several, the deviation; speed and memory of the first."""
    lines = ["| method | " + " | ".join(COLUMNS) + " | samples/s | peak MiB |"]
    lines.append("| --- |" + " ---: |" * (len(COLUMNS) + 2))
    for name, results in rows.items():
        cells = [_cell([each["metrics"][key] for each in results]) for key in COLUMNS.values()]
        cost = results[0]["training"]
        cells += [f"{cost['samples_per_second']:.0f}", f"{cost['peak_memory_mib']:.0f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def _run(table: str, name: str, overrides: str, seed: int, threads: int) -> dict:
    folder = "".join(each if each.isalnum() else "_" for each in f"{table}_{name}_{seed}").lower()
    command = [sys.executable, "train.py", "experiment=demo/clip", f"name={folder}", f"runs={RUNS}", f"seed={seed}"]
    print(f"== {name}, seed {seed}", file=sys.stderr, flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    subprocess.run([*command, *overrides.split()], cwd=ROOT, env=environment, check=True)
    return json.loads((RUNS / folder / "results.json").read_text())


if __name__ == "__main__":
    main()
