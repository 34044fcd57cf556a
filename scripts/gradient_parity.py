"""Do ranks and micro-batches change a gradient? Every legal pair of head and objective, as a Markdown table.

python scripts/gradient_parity.py                       1, 2 and 4 ranks, each whole and in micro-batches of a quarter
python scripts/gradient_parity.py --ranks 2 --heads clip kme

A cell is the largest difference of any parameter's gradient (encoders, head, temperature or gamma, objective) from
that of one process with the whole batch, relative to the parameter's largest gradient. Real gloo processes, DDP and
float64, through the trainer's own `clipzoo.training.gradient_cache`. The last rows show open_clip's ClipLoss with its
default flags and its accumulation (`--accum-freq 4`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import socket
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clipzoo import Batch, Encoder, Features, Model, Progress, World
from clipzoo.api import build
from clipzoo.cli.arguments import Parser, number_in, run_main
from clipzoo.config.groups import CONF
from clipzoo.config.vocabulary import Count
from clipzoo.objectives.compatibility import check_pair
from clipzoo.training.gradient_cache import GradientCache

SAMPLES, BATCH, PARTS = 24, 16, 4
IMAGE_WIDTH, TEXT_WIDTH, END = 10, 6, 19
SMALL = {"embed_width": 8, "features": 32, "evaluation_features": 32}
"""Sizes of heads that change no formula."""
OPEN_CLIP = "open_clip ClipLoss"

Pair = tuple[str, str]
Gradients = dict[str, Tensor]


def main() -> int:
    options = _options()
    pairs = compatible_pairs(options.heads)
    expected = {pair: gradients(pair, 1) for pair in pairs}
    peer = open_clip_gradients(1)
    columns: dict[str, dict[Pair, str]] = {}
    for ranks in options.ranks:
        for parts in (1, PARTS):
            actual, peer_actual = _on_ranks(ranks, pairs, parts)
            name = f"{ranks} rank{'s' * (ranks > 1)}" + ", micro-batches" * (parts > 1)
            columns[name] = {pair: f"{difference(actual[pair], expected[pair]):.0e}" for pair in pairs}
            columns[name] |= {(OPEN_CLIP, part): f"{error:.1g}" for part, error in _by_part(peer_actual, peer).items()}
    print(table(columns))
    ours = [float(column[pair]) for column in columns.values() for pair in pairs]
    print(f"\n{len(pairs)} pairs; largest difference {max(ours):.1e}")
    return int(max(ours) > 1e-10)


def compatible_pairs(heads: Iterable[str] | None = None) -> list[Pair]:
    """Head and objective as conf/ describes them, those that may be trained together."""
    return [
        (head, objective)
        for head in heads or _names("head")
        for objective in _names("objective")
        if check_pair(build.build_head(plain := _config(head, objective)), build.build_objective(plain)).compatible
    ]


def gradients(pair: Pair, parts: int, world: World = World()) -> Gradients:
    """Every parameter's gradient after two batches, on this rank's share in `parts` micro-batches; and the state."""
    plain = _config(*pair)
    torch.manual_seed(0)
    model = Model(SmallEncoder(), build.build_head(plain)).double()
    objective = build.build_objective(plain).double()
    objective.allocate(SAMPLES)
    share = BATCH // world.size
    cache = GradientCache(model, objective, world, share // parts)
    both = nn.ModuleDict({"model": model, "objective": objective})
    for step in range(2):  # DDP rebuilds its buckets after the first; per-sample state matters in the second
        both.zero_grad()
        model.head.resample(step)
        cache(_batch(step).split(share)[world.rank], Progress(step, 10, SAMPLES, BATCH))
    values = {name: parameter.grad.clone() for name, parameter in both.named_parameters() if parameter.grad is not None}
    return values | {f"state {name}": value.clone() for name, value in objective.named_buffers()}


def open_clip_gradients(parts: int, world: World = World()) -> Gradients:
    """Return gradients of the batch under open_clip's loss with the default options of its training program."""
    from open_clip.loss import ClipLoss

    torch.manual_seed(0)
    model: Any = OpenClipLike().double()
    loss = ClipLoss(rank=world.rank, world_size=world.size)
    if world.size > 1:
        model = DistributedDataParallel(model)
    mine = _batch(0).split(BATCH // world.size)[world.rank]
    shares = mine.split(len(mine) // parts)
    with torch.no_grad():
        cached = [model(share)[:2] for share in shares]
    for position, share in enumerate(shares):  # its accumulation: each part again, the others from the cache
        image, text, scale = model(share)
        images = [image if other == position else features for other, (features, _) in enumerate(cached)]
        texts = [text if other == position else features for other, (_, features) in enumerate(cached)]
        loss(torch.cat(images), torch.cat(texts), scale).backward()
    return {name.removeprefix("module."): parameter.grad.clone() for name, parameter in model.named_parameters()}


def difference(actual: Gradients, expected: Gradients) -> float:
    """The largest relative difference; finite numbers only where both are."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    return max(_difference(actual[name], value) for name, value in expected.items())


def table(columns: dict[str, dict[Pair, str]]) -> str:
    rows = list(next(iter(columns.values())))
    lines = [f"| head | objective | {' | '.join(columns)} |", f"| --- | --- |{' ---: |' * len(columns)}"]
    lines += [f"| {' | '.join([*row, *(column[row] for column in columns.values())])} |" for row in rows]
    return "\n".join(lines)


class SmallEncoder(Encoder):
    """Two towers with tokens and captions of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.image_width, self.text_width = IMAGE_WIDTH, TEXT_WIDTH
        self.patches = nn.Linear(12, IMAGE_WIDTH)
        self.words = nn.Embedding(END + 1, TEXT_WIDTH)
        self.mix = nn.Linear(TEXT_WIDTH, TEXT_WIDTH)

    def image(self, image: Tensor) -> Features:
        tokens = self.patches(image.unflatten(2, (2, 2)).transpose(1, 2).flatten(2)).tanh()  # [b, 2, IMAGE_WIDTH]
        return Features(tokens.mean(dim=1), tokens)

    def text(self, text: Tensor) -> Features:
        mask = (text == END).cumsum(dim=1) - (text == END).int() == 0
        tokens = self.mix(self.words(text)).tanh()
        return Features((tokens * mask[..., None]).sum(dim=1), tokens, mask)


class OpenClipLike(nn.Module):
    """The inputs of open_clip's losses: unit vectors of both towers and the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = SmallEncoder()
        self.image_projection = nn.Linear(IMAGE_WIDTH, 8, bias=False)
        self.text_projection = nn.Linear(TEXT_WIDTH, 8, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(2.6593))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        image = self.image_projection(self.encoder.image(batch.image).pooled)
        text = self.text_projection(self.encoder.text(batch.text).pooled)
        return nn.functional.normalize(image, dim=-1), nn.functional.normalize(text, dim=-1), self.logit_scale.exp()


def _batch(step: int) -> Batch:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, END, (BATCH, 6), generator=generator)
    text[torch.arange(BATCH), torch.arange(BATCH) % 5 + 1] = END
    ids = torch.randperm(SAMPLES, generator=generator)[:BATCH]
    return Batch(torch.randn(BATCH, 3, 4, 2, generator=generator, dtype=torch.float64), text, ids)


def _config(head: str, objective: str) -> dict[str, Any]:
    return {**_part("head", head), **_part("objective", objective)}


@cache
def _part(group: str, name: str) -> dict[str, Any]:
    """The resolved node of conf/<group>/<name>.yaml under its group's name, with the seed; heads are small."""
    encoder = f"+encoder={{image_width:{IMAGE_WIDTH},text_width:{TEXT_WIDTH}}}"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(None, [f"+{group}={name}", encoder, "+seed=0"])
    for key, value in SMALL.items():
        if key in config[group]:
            config[group][key] = value
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {group: plain[group], "seed": 0}


def _names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if not path.stem.startswith("_"))


def _difference(actual: Tensor, expected: Tensor) -> float:
    ordinary = expected.isfinite()
    if not torch.equal(actual[~ordinary], expected[~ordinary]) or not ordinary.any():
        return 0.0 if not ordinary.any() else float("inf")
    scale = expected[ordinary].abs().max().clamp_min(1e-12)
    return float((actual[ordinary] - expected[ordinary]).abs().max() / scale)


def _by_part(actual: Gradients, expected: Gradients) -> dict[str, float]:
    """Relative differences of the towers' gradients and of the temperature's."""
    scale = "logit_scale"
    towers = max(_difference(actual[name], value) for name, value in expected.items() if name != scale)
    return {"InfoNCE: towers": towers, "InfoNCE: temperature": _difference(actual[scale], expected[scale])}


def _on_ranks(ranks: int, pairs: Sequence[Pair], parts: int) -> tuple[dict[Pair, Gradients], Gradients]:
    """Return the gradients of the first of `ranks` new processes."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers: Any = context.SimpleQueue()
    processes = [
        context.Process(target=_rank, args=(answers, rank, ranks, port, pairs, parts), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    answer = pickle.loads(answers.get())
    for process in processes:
        process.join()
    return answer


def _rank(answers: Any, rank: int, ranks: int, port: int, pairs: Sequence[Pair], parts: int) -> None:
    torch.set_num_threads(1)
    names = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    world = World.join("cpu", 300)
    values = {pair: gradients(pair, parts, world) for pair in pairs}, open_clip_gradients(parts, world)
    if rank == 0:
        # By value: tensors sent as shared memory would die with this process.
        answers.put(pickle.dumps(values))
    world.barrier()
    # gloo with DDP may abort in its destructors.
    sys.stderr.flush()
    os._exit(0)


def _options() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=number_in(Count), nargs="+", default=[1, 2, 4])
    parser.add_argument("--heads", nargs="+", help="only these")
    return parser.parse_args()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    torch.set_num_threads(1)
    run_main(main)
