"""A training of open_clip, resumed here and by open_clip: the relative difference of the losses of the next 50 steps.

    python scripts/resume_open_clip.py

The program of the installed open_clip (open_clip_train.main) trains 10 steps and saves epoch_1.pt. It resumes from
this file, and so does our loop, as with `clipzoo train init.resume=epoch_1.pt`. Both read the same batches from memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import clipzoo
from clipzoo.build import build_model, build_parts
from clipzoo.cli.arguments import Parser, run_main
from clipzoo.config.compose import compose
from clipzoo.data.in_memory import InMemoryDataset
from clipzoo.distributed.world import World
from clipzoo.encoders.weights import Row
from clipzoo.initial import initialise
from clipzoo.loading import PAIR, LoadedModel
from clipzoo.model import Model
from clipzoo.training.parts import Parts
from clipzoo.training.settings import Computation

BATCH, EPOCH_STEPS = 8, 10
TINY = ["encoder=tiny", "encoder.text_width=8", "head.embed_width=16"]
RESNET = [
    "encoder=clip_rn50", "encoder.image_size=64", "encoder.context_length=16", "encoder.image_tower.layers=[1,1,1,1]",
    "encoder.image_tower.stem_width=8", "encoder.image_width=256", "encoder.image_tower.heads=8",
    "encoder.text_width=8", "encoder.text_tower.layers=2", "encoder.text_tower.heads=2", "head.embed_width=16",
    "+head.bias=image",
]  # fmt: skip
CASES: dict[str, tuple[list[str], list[str]]] = {
    "ViT": (TINY, []),
    "ViT, gradient clipping": ([*TINY, "trainer.clip_gradient=1.0"], ["--grad-clip-norm", "1.0"]),
    "ViT, SigLIP": ([*TINY, "objective=siglip", "head.temperature=0.1"], ["--siglip"]),
    "ResNet, batch norm in training mode": (RESNET, []),
}
"""Overrides of clipzoo and flags of open_clip."""
SETTINGS = [
    "data.shards=none.tar", f"trainer.global_batch={BATCH}", "optim.eps=1e-6", "optim.weight_decay=0.2",
    "optim.schedule.warmup_epochs=null", "optim.schedule.warmup_steps=5", "optim.schedule.end=0",
]  # fmt: skip
FLAGS = [
    "--lr", "5e-4", "--wd", "0.2", "--beta1", "0.9", "--beta2", "0.98", "--eps", "1e-6", "--warmup", "5",
    "--batch-size", str(BATCH), "--device", "cpu", "--precision", "fp32", "--train-data", "none",
]  # fmt: skip


class Training:
    """Both sides of a case: one configuration, one initial model, one sequence of batches. epochs: of 10 steps each."""

    def __init__(self, case: str, precision: str, folder: Path, epochs: int) -> None:
        overrides, flags = CASES[case]
        self.plain = compose([*SETTINGS, *overrides, f"trainer.epochs={epochs}", f"trainer.precision={precision}"])
        self.folder = folder
        self.flags, self.dtype = [*FLAGS, "--epochs", str(epochs), *flags], getattr(torch, precision)
        model = build_model(self.plain)
        pair = {PAIR: {"log_scale": 0.0, "bias": -10.0}} if "--siglip" in flags else {}
        clipzoo.export(LoadedModel(model, self.plain | pair).eval(), folder / "model")
        random = torch.Generator().manual_seed(0)
        count, size = BATCH * EPOCH_STEPS, self.plain["encoder"]["image_size"]
        images = torch.randint(0, 256, (count, 3, size, size), generator=random, dtype=torch.uint8)
        texts = torch.randint(1, 49406, (count, 16), generator=random)
        texts[:, -1] = 49407
        self.dataset = InMemoryDataset(images, texts)
        encoder: Any = model.to(self.dtype).encoder
        batches = self.dataset.batches(
            seed=0, global_batch=BATCH, world=World(), start_step=0, stop_step=EPOCH_STEPS * epochs, trim_text=False
        )
        self.peer_batches = [(encoder.normalised(batch.image), batch.text) for batch in batches]

    def open_clip(self, name: str, *flags: str) -> list[float]:
        """Run open_clip's program on the batches; return the loss of each step. Writes <folder>/<name>/checkpoints."""
        from open_clip_train import main

        create_model, create_loss, losses = main.create_model_and_transforms, main.create_loss, list[float]()

        def model_in_precision(*arguments: Any, **named: Any) -> tuple[nn.Module, Any, Any]:
            model, *transforms = create_model(*arguments, **named)
            return model.to(self.dtype), *transforms

        def recording_loss(args: Any) -> Any:
            loss = create_loss(args)

            def recorded(**features: Any) -> Any:
                values = loss(**features)
                losses.append(sum(values.values()).item())
                return values

            return recorded

        changes: dict[str, Any] = {
            "create_model_and_transforms": model_in_precision, "create_loss": recording_loss,
            "get_data": lambda *arguments, **named: {"train": Epochs(self.peer_batches)},
            "setup_logging": lambda *arguments: None,
        }  # fmt: skip
        places = ["--logs", str(self.folder), "--name", name, "--model", f"local-dir:{self.folder / 'model'}"]
        with mock.patch.multiple(main, **changes):
            main.main([*self.flags, *places, *flags])
        return losses

    def clipzoo(self, checkpoint: Path, folder: Path) -> list[float]:
        """Continue the checkpoint to the end in the run directory `folder`; return the loss of each step."""
        plain = {**self.plain, "init": {**self.plain["init"], "resume": str(checkpoint)}}
        model, parts, _ = started(plain, self.dataset, folder)
        settings = parts.settings
        result = clipzoo.train(
            model, parts.objective, self.dataset, batch=BATCH, epochs=settings.epochs, optimizer=parts.optimizer,
            computation=Computation(settings.precision, clip_gradient=settings.clip_gradient), folder=folder,
            log_every=1, quiet=True,
        )  # fmt: skip
        return [line["loss"] for line in result.history]


def started(plain: dict[str, Any], dataset: InMemoryDataset, folder: Path) -> tuple[Model, Parts, list[Row]]:
    """Return the model and the parts of a new run that continues a checkpoint, and the outcome of each tensor."""
    parts = replace(build_parts(plain), dataset=dataset)
    model = build_model(plain, parts.head)
    return model, parts, initialise(model, folder, plain, plain, parts, (), World())


class Epochs:
    """Batches in the form that open_clip's program expects of its data."""

    num_batches, num_samples = EPOCH_STEPS, EPOCH_STEPS * BATCH

    def __init__(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._batches, self.dataloader, self._epoch = batches, self, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._batches[self._epoch * EPOCH_STEPS : (self._epoch + 1) * EPOCH_STEPS])


def differences(case: str, precision: str, folder: Path, epochs: int = 6) -> list[float]:
    """Return the relative difference of the losses of each step after the resume."""
    training = Training(case, precision, folder, epochs)
    training.open_clip("first")
    checkpoint = folder / "first" / "checkpoints" / "epoch_1.pt"
    expected = training.open_clip("resumed", "--resume", str(checkpoint))
    actual = training.clipzoo(checkpoint, folder / "ours")
    return [abs(ours / theirs - 1) for ours, theirs in zip(actual, expected, strict=True)]


def main() -> None:
    Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(
        "| training | precision | steps | first step | largest of 10 | largest of all |\n| --- | --- "
        + "| ---: " * 4
        + "|"
    )
    for precision in ("float64", "float32"):
        for case in CASES:
            with tempfile.TemporaryDirectory() as folder:
                values = differences(case, precision, Path(folder))
            numbers = " | ".join(f"{value:.0e}" for value in (values[0], max(values[:10]), max(values)))
            print(f"| {case} | {precision} | {len(values)} | {numbers} |", flush=True)


if __name__ == "__main__":
    run_main(main)
