"""Fine-tune a model of half of the generated world's shapes on the other half, five ways, and print the table.

python scripts/fine_tuning_table.py --seeds 3
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

import clipzoo
from clipzoo.build import build_model
from clipzoo.cli.arguments import Parser, number_in, run_main
from clipzoo.config.compose import compose
from clipzoo.config.vocabulary import Count
from clipzoo.encoders.tuning import Frozen, Full, LastLayers, Lora, Tuning
from clipzoo.lab.worlds.scenes import SHAPES, render, sample_scene, write_caption
from clipzoo.objectives.infonce import InfoNCE

SIZE, BATCH = 64, 64
Pairs = tuple[Tensor, list[str], list[int]]
KNOWN, NEW = SHAPES[:5], SHAPES[5:]
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Number of seeds -> 97.5 % quantile of Student's t."""


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, choices=sorted(T_95), help="default: %(default)s")
    count = number_in(Count)
    parser.add_argument("--images", type=count, default=3000, help="of the first half; default: %(default)s")
    parser.add_argument("--new", type=count, default=1000, help="images of the other half; default: %(default)s")
    parser.add_argument("--steps", type=count, default=400, help="of the first training; default: %(default)s")
    parser.add_argument("--tuning-steps", type=count, default=60, help="of a fine-tuning; default: %(default)s")
    options = parser.parse_args()
    config = compose(["experiment=demo/clip"])
    tests = {"known": scenes(KNOWN, 500, seed=1), "new": scenes(NEW, 500, seed=2)}
    results: dict[str, list[tuple[float, float]]] = {}
    for seed in range(options.seeds):
        plain = {**config, "seed": seed}
        base, untrained = build_model(plain), build_model(plain)
        train(base, scenes(KNOWN, options.images, 10 + seed), options.steps, 1e-3, None, seed)
        pairs = scenes(NEW, options.new, 20 + seed)
        for name, tuning, rate in ways():
            model = copy.deepcopy(untrained if name == "from scratch" else base)
            if name != "none":
                train(model, pairs, options.tuning_steps, rate, tuning, seed)
            scores = accuracy(model, tests["new"], NEW), accuracy(model, tests["known"], KNOWN)
            results.setdefault(name, []).append(scores)
            print(f"seed {seed}  {name:16} new {scores[0]:5.1f}  known {scores[1]:5.1f}", flush=True)
    # Means and 95 % intervals over seeds.
    print("\n| fine-tuning | new shapes | known shapes |\n| --- | --- | --- |")
    for name, values in results.items():
        columns = [np.array(column) for column in zip(*values, strict=True)]
        halves = [T_95[options.seeds] * column.std(ddof=1) / options.seeds**0.5 for column in columns]
        cells = [f"{column.mean():.1f} ± {half:.1f}" for column, half in zip(columns, halves, strict=True)]
        print(f"| {name} | {' | '.join(cells)} |")


def ways() -> list[tuple[str, Tuning | None, float]]:
    """Name, tuning and peak learning rate of each way."""
    full, frozen, last, lora = Full(1.0, 1.0), Frozen(0.0), LastLayers(1, 1.0, 1.0), Lora(8, 16.0, None, 1.0, 1.0)
    adapters = Lora(8, 16.0, ["*weight"], 1.0, 1.0)
    return [
        ("none", None, 0.0),
        ("full", Tuning(full, full, 1.0, 0), 5e-4),
        ("frozen image tower", Tuning(frozen, full, 1.0, 0), 1e-3),
        ("last layer", Tuning(last, last, 1.0, 0), 1e-3),
        ("LoRA", Tuning(adapters, lora, 1.0, 0), 2e-3),
        ("from scratch", None, 1e-3),
    ]


def scenes(shapes: Sequence[str], count: int, seed: int) -> Pairs:
    """Images uint8 [count, 3, S, S], captions and labels of scenes with one thing each, of the shapes in turn."""
    images, captions, labels = [], [], []
    for index in range(count):
        random = np.random.default_rng([seed, index])
        scene = sample_scene(random, "single", shape=shapes[index % len(shapes)])
        captions.append(write_caption(scene, random, detail=1.0))
        images.append(torch.from_numpy(np.asarray(render(scene, SIZE, random)).copy()).permute(2, 0, 1))
        labels.append(index % len(shapes))
    return torch.stack(images), captions, labels


def train(model: clipzoo.Model, data: Pairs, steps: int, rate: float, tuning: Tuning | None, seed: int) -> None:
    dataset = clipzoo.InMemoryDataset(data[0], model.encoder.tokenizer(data[1]))
    clipzoo.train(
        model, InfoNCE(0.5, 0.5), dataset, batch=BATCH, steps=steps, learning_rate=rate, tuning=tuning, seed=seed,
        device="cpu", quiet=True,
    )  # fmt: skip


@torch.no_grad()
def accuracy(model: clipzoo.Model, data: Pairs, shapes: Sequence[str]) -> float:
    """Zero-shot accuracy in percent, with one prompt."""
    model.eval()
    text = model.encode_text(model.encoder.tokenizer([f"a {shape}" for shape in shapes]))
    images = clipzoo.concatenate([model.encode_image(part) for part in data[0].split(100)])
    predicted = model.similarity(images, text).argmax(dim=1)
    return 100 * (predicted == torch.tensor(data[2])).double().mean().item()


if __name__ == "__main__":
    run_main(main)
