"""Compare heads and objectives on the drawings at one small budget, from pictures that are decoded once.

python scripts/hands_methods.py clip kme --seeds 0 1 2            experiments hands/clip and hands/kme
python scripts/hands_methods.py cloob --set head.hopfield_start=200 --label cloob_start_200
python scripts/hands_methods.py clip --set encoder=tiny optim.schedule.start=null --label vit_open_clip --open-clip
python scripts/hands_methods.py clip kme --steps 2036 --output runs/hands_methods_x10
python scripts/hands_tables.py runs/hands_methods*/*              their rows

Towers, objectives, optimizers and schedules are those of the experiments hands/NAME, with smaller batches and half of
the learning rate (SMALL). Reading and decoding cost as much as such small models, so pictures are decoded once, at
LARGE pixels, and each step takes random squares of 32 pixels and one of the captions of each sample. --open-clip trains
CLIP, of a vision transformer, with open_clip's `train_one_epoch`, loss and schedule instead, from the same weights on
the same batches.
Finished runs are kept: <output>/LABEL_seedN has predictions and results.json.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

import clipzoo
from clipzoo.build import build_model, build_objective, build_part
from clipzoo.cli.arguments import Parser, number_in, run_main
from clipzoo.config.compose import compose
from clipzoo.config.vocabulary import Count
from clipzoo.data.base import Dataset
from clipzoo.data.plan import Plan
from clipzoo.data.tokenizer import ClipTokenizer
from clipzoo.errors import ConfigError
from clipzoo.io import below, read_yaml
from clipzoo.lab.twin import train_with_open_clip
from clipzoo.lab.worlds.hands import Drawing, read_drawings, split_drawings
from clipzoo.lab.worlds.packages import SOURCES
from clipzoo.model import Model
from clipzoo.runs.record import RunRecord, revision
from clipzoo.training.parts import Optimizer
from clipzoo.training.train import train
from clipzoo.types import Batch, World

TESTS = ("hands", "things", "both")
SMALL = ("trainer.global_batch=128", "optim.schedule.peak=2.0e-3")
LARGE = 36
"""Side of a picture in pixels, from which a square of the model's size is cut: at 32, four fifths of the area."""
BLOCK = 64


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="+", help="experiments of hands")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides")
    parser.add_argument("--label", help="name of the runs; default: that of the experiment")
    parser.add_argument("--open-clip", action="store_true", help="train with open_clip")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=number_in(Count), default=611, help="default: %(default)s, three epochs of 128")
    parser.add_argument("--root", type=Path, default=Path("data/hands"), help="folder of `clipzoo hands`")
    parser.add_argument("--output", type=Path, default=Path("runs/hands_methods"))
    options = parser.parse_args()
    facts = read_yaml(SOURCES)
    drawings = read_drawings(options.root / "pictures", facts["hands"])
    if not drawings:
        raise ConfigError(f"{options.root} has no drawings: make them with `clipzoo hands`, or give --root")
    splits = split_drawings(drawings, facts["held_out"]["hands"], facts["held_out"]["things"])
    cached: dict[str, Tensor] = {}
    for seed in options.seeds:
        for name in options.names:
            folder = below(options.output, f"{options.label or name}_seed{seed}")
            if (folder / "results.json").exists():
                continue
            plain = compose([f"experiment=hands/{name}", f"seed={seed}", *SMALL, *options.set])
            size = plain["encoder"]["image_size"]
            tokenizer = build_part(plain["encoder"]["tokenizer"], kind=ClipTokenizer)
            for split, part in splits.items() if not cached else ():
                cached[split] = pictures(part, options.root, LARGE if split == "train" else size)
            model, started = build_model(plain), time.process_time()
            dataset = Drawings(cached["train"], splits["train"], size, tokenizer)
            batch = plain["trainer"]["global_batch"]
            if options.open_clip:
                model, loss = train_in_open_clip(model, plain, dataset, batch, options.steps)
            else:
                result = train(
                    model, build_objective(plain), dataset, batch=batch, steps=options.steps,
                    optimizer=build_part(plain["optim"], kind=Optimizer), evaluate_every=None, seed=seed, device="cpu",
                    log_every=100,
                )  # fmt: skip
                loss = result.history[-1]["loss"]
            seconds = time.process_time() - started
            (folder / "zero_shot").mkdir(parents=True, exist_ok=True)
            for test in TESTS:
                guesses, labels = answers(model, cached[test], splits[test], tokenizer)
                file = folder / "zero_shot" / f"names_{test}.npz"
                np.savez(file, all_predictions=guesses, all_labels=labels)
            command = tuple(sys.argv[1:])
            cost = {"steps": options.steps, "cpu_seconds": seconds, "loss": loss}
            RunRecord(f"hands/{name}", None, command, seed=seed, revision=revision(), training=cost).write(folder)


def train_in_open_clip(
    model: Model, plain: dict[str, Any], dataset: Drawings, batch: int, steps: int
) -> tuple[Model, float]:
    """Return the model that open_clip trains from the weights of `model`, as clipzoo loads it, and its last loss."""
    import open_clip
    from open_clip_train.params import parse_args

    optim = plain["optim"]
    values = {
        "lr": optim["schedule"]["peak"], "warmup": optim["schedule"]["warmup_steps"], "wd": optim["weight_decay"],
        "beta1": optim["betas"][0], "beta2": optim["betas"][1], "eps": optim["eps"], "batch-size": batch,
        "model": "ViT-B-32", "device": "cpu", "precision": "fp32", "log-every-n-steps": 100,
        "grad-clip-norm": 1e9,  # never reached; open_clip then passes the gradients to the recorder of losses
    }  # fmt: skip
    flags = parse_args([word for name, value in values.items() for word in (f"--{name}", str(value))])
    flags.rank, flags.local_rank, flags.world_size, flags.distill, flags.wandb = 0, 0, 1, False, False
    batches = dataset.batches(
        seed=plain["seed"], global_batch=batch, world=World(), start_step=0, stop_step=steps, trim_text=False
    )
    inputs = ((model.encoder.normalised(batch.image), batch.text) for batch in batches)  # type: ignore[operator]
    with tempfile.TemporaryDirectory() as folder:
        clipzoo.export(clipzoo.LoadedModel(model, plain), folder)
        peer = open_clip.create_model(f"local-dir:{folder}", output_dict=True)
        curves = train_with_open_clip(peer, inputs, steps, flags, False, World())
        save_file(peer.state_dict(), Path(folder) / "open_clip_model.safetensors")
        return clipzoo.load(folder).eval(), curves["loss"][-1]


def pictures(part: Sequence[Drawing], root: Path, size: int) -> Tensor:
    """[n, 3, S, S] uint8, whole pictures."""
    images = np.empty((len(part), size, size, 3), np.uint8)
    for row, drawing in zip(images, part, strict=True):
        with Image.open(below(root / "pictures", f"{drawing.uid}.png")) as picture:
            row[:] = np.asarray(picture.convert("RGB").resize((size, size), Image.Resampling.BICUBIC))
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


class Drawings(Dataset):
    """Random squares of pictures in memory, with one of their captions, drawn for each step.

    images: [n, 3, LARGE, LARGE]. size: side of a square.
    """

    def __init__(self, images: Tensor, part: Sequence[Drawing], size: int, tokenizer: ClipTokenizer) -> None:
        self._images, self._size, self.samples = images, size, len(images)
        captions = [drawing.captions for drawing in part]
        self._count = torch.tensor([len(texts) for texts in captions])
        self._first = self._count.cumsum(0) - self._count
        self._texts = tokenizer([text for texts in captions for text in texts])  # [all captions, L]
        self._key = torch.unique(self._texts, dim=0, return_inverse=True)[1]

    @property
    def fingerprint(self) -> str:
        return f"{self.samples} drawings"

    def check(self, seed: int, global_batch: int) -> None:
        Plan([[self.samples]], [1.0], seed, 1, global_batch)

    def batches(
        self, *, seed: int, global_batch: int, world: World, start_step: int, stop_step: int, trim_text: bool
    ) -> Iterator[Batch]:
        plan = Plan([[self.samples]], [1.0], seed, 1, global_batch)
        for step in range(start_step, stop_step):
            draw = torch.Generator().manual_seed(seed * 2**32 + step)
            ids = torch.from_numpy(plan.rows(step).sample_id.copy())
            corners = torch.randint(LARGE - self._size + 1, (len(ids), 2), generator=draw).tolist()
            squares = [
                image[:, top : top + self._size, left : left + self._size]
                for image, (top, left) in zip(self._images[ids], corners, strict=True)
            ]
            place = self._first[ids] + (torch.rand(len(ids), generator=draw) * self._count[ids]).long()
            texts = self._texts[place]
            length = int((texts != 0).sum(1).max()) if trim_text else texts.shape[1]
            yield Batch(torch.stack(squares), texts[:, :length], ids, caption_key=self._key[place])


@torch.no_grad()
def answers(
    model: Model, images: Tensor, part: Sequence[Drawing], tokenizer: ClipTokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Zero-shot guesses and labels, [n] each, among the names of a split."""
    names = sorted({drawing.group for drawing in part})
    labels = {name: label for label, name in enumerate(names)}
    text = model.encode_text(tokenizer(names))
    guesses = [model.similarity(model.encode_image(block), text).argmax(1) for block in images.split(BLOCK)]
    return torch.cat(guesses).numpy(), np.array([labels[drawing.group] for drawing in part])


if __name__ == "__main__":
    run_main(main)
