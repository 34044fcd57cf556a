"""Train the model of a run on the drawings with open_clip's own program, and evaluate it with clipzoo.

python scripts/hands_open_clip.py runs/hands/clip runs/hands/open_clip

Both programs start from the same weights and have the same shards, batch size, number of steps, optimizer, schedule
and crops. open_clip reads one caption of a sample, from its .txt: it gets CAPTIONS copies of the shards with one of the
captions each, and an epoch of its program reads them all. It needs an older webdataset and pandas, which the script
installs into .peer without touching the environment. The results are in SECOND/results.json.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from benchmarks import PEER, install

import clipzoo
from clipzoo.build import build_model
from clipzoo.cli.arguments import Parser, run_main
from clipzoo.errors import ConfigError
from clipzoo.runs.directory import config_of
from clipzoo.runs.record import RunRecord

CAPTIONS = 3
"""Captions of a sample at most."""


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="finished run of CLIP, whose settings open_clip gets")
    parser.add_argument("output", type=Path, help="folder for shards, logs and results")
    options = parser.parse_args()
    plain, folder = config_of(options.run), options.output
    steps = RunRecord.read(options.run).training["steps"]
    clipzoo.export(clipzoo.LoadedModel(build_model(plain), plain), folder / "model")
    count, samples = one_caption_each(Path(plain["data"]["shards"]), folder / "shards")
    command = open_clip_command(plain, steps, count, samples, folder)
    install(PEER, ["webdataset==0.2.86", "pandas"])
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    paths = {"PYTHONPATH": str(PEER), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": threads}
    subprocess.run(command, check=True, env={**os.environ, **paths})
    checkpoint = max((folder / "logs/run/checkpoints").glob("epoch_*.pt"), key=lambda path: path.stat().st_mtime)
    evaluate = ["evaluate", f"model=local-dir:{folder / 'model'}", f"pretrained={checkpoint}", "eval=hands"]
    evaluate += [f"eval.root={plain['eval']['root']}", f"output={folder}"]
    subprocess.run([sys.executable, "-m", "clipzoo.cli", *evaluate], check=True)


def one_caption_each(shards: Path, folder: Path) -> tuple[int, int]:
    """Copy shards CAPTIONS times: copy k has the k-th caption of a sample as its .txt, modulo their number.

    Returns the numbers of shards and samples.
    """
    folder.mkdir(parents=True)
    paths, samples = sorted(shards.glob("*.tar")), 0
    for place, path in enumerate(paths):
        with tarfile.open(path) as archive:
            files = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
        for copy in range(CAPTIONS):
            with tarfile.open(folder / f"{copy * len(paths) + place:05}.tar", "w") as archive:
                for name, content in files.items():
                    stem, kind = os.path.splitext(name)
                    if kind == ".txt":
                        captions = json.loads(files[f"{stem}.json"])["captions"]
                        content = captions[copy % len(captions)].encode()
                        samples += 1
                    if kind != ".json":
                        member = tarfile.TarInfo(name)
                        member.size = len(content)
                        archive.addfile(member, io.BytesIO(content))
    return CAPTIONS * len(paths), samples


def open_clip_command(plain: dict[str, Any], steps: int, shards: int, samples: int, folder: Path) -> list[str]:
    """Return the command line of open_clip's program for a configuration of clipzoo."""
    optimizer, batch = plain["optim"], plain["trainer"]["global_batch"]
    schedule, (beta1, beta2) = optimizer["schedule"], optimizer["betas"]
    epochs = round(steps * batch / samples)
    if schedule["end"] or plain["objective"]["_target_"].rpartition(".")[2] != "InfoNCE" or not epochs:
        raise ConfigError(
            f"{plain['name']}: open_clip's program has InfoNCE, a schedule to 0, and epochs of {samples:,}"
        )
    flags = {
        "model": f"local-dir:{folder / 'model'}", "train-data": str(folder / f"shards/{{00000..{shards - 1:05}}}.tar"),
        "dataset-type": "webdataset", "train-num-samples": steps * batch // epochs, "epochs": epochs,
        "batch-size": batch, "workers": 1, "precision": "fp32", "device": "cpu", "seed": plain["seed"],
        "lr": schedule["peak"], "warmup": schedule["warmup_steps"], "wd": optimizer["weight_decay"], "beta1": beta1,
        "beta2": beta2, "eps": optimizer["eps"], "log-every-n-steps": 50, "logs": folder / "logs", "name": "run",
    }  # fmt: skip
    if plain["trainer"]["clip_gradient"]:
        flags["grad-clip-norm"] = plain["trainer"]["clip_gradient"]
    crop = f"scale=({','.join(map(str, plain['data']['crop_scale']))})"
    given = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "open_clip_train.main", *given, "--aug-cfg", crop]


if __name__ == "__main__":
    run_main(main)
