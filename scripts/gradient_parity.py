"""Do ranks and micro-batches change a gradient? Every compatible pair of head and objective, as a Markdown table.

python scripts/gradient_parity.py                       1, 2 and 4 ranks, each whole and in micro-batches of a quarter
python scripts/gradient_parity.py --ranks 2 --heads clip kme
python scripts/gradient_parity.py --steps 5             a training with ddp, fsdp and hybrid sharding on 2 and 4 ranks

A cell is the largest difference of any parameter's gradient (encoders, head, temperature or gamma, objective) from
that of one process with the whole batch, relative to the parameter's largest gradient. Real gloo processes, DDP and
float64, through the trainer's own `clipzoo.training.gradients`. The last rows show open_clip's ClipLoss, with the
default flags of its program and with the recommended `--local-loss --gather-with-grad`; its micro-batches are those of
`--accum-freq 4`. "towers x ranks": the gradients of the towers multiplied by the number of ranks.

With --steps a cell is the largest difference of the loss of any step, and of the gradients and the objective's state in
the last step, from those of one process. The last row has the share of weights and optimizer state on the first rank.
"""

from __future__ import annotations

import argparse
import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clipzoo import Batch, Encoder, Features, Model, Progress, World, build
from clipzoo.cli.arguments import Parser, number_in, run_main
from clipzoo.config.groups import CONF
from clipzoo.config.vocabulary import Count
from clipzoo.distributed.parallel import Parallel
from clipzoo.objectives.base import Objective, check_pair
from clipzoo.training.gradients import GradientCache
from clipzoo.training.optimizers import adam
from clipzoo.training.parts import Optimizer

SAMPLES, BATCH, PARTS, CLIP = 24, 16, 4, 1.0
IMAGE_WIDTH, TEXT_WIDTH, END = 10, 6, 19
SMALL = {"embed_width": 8, "features": 32, "evaluation_features": 32}
"""Sizes of heads that change no formula."""
EVEN = 32, 16
"""Widths of towers whose parameters four ranks divide evenly."""
OPEN_CLIP = {"open_clip, default flags": False, "open_clip, `--local-loss --gather-with-grad`": True}
"""Rows of open_clip's ClipLoss, and whether local_loss and gather_with_grad are set."""

Pair = tuple[str, str]
Gradients = dict[str, Tensor]


def main() -> int:
    options = _options()
    pairs = compatible_pairs(options.heads)
    columns = (
        training_columns(pairs, options.ranks, options.steps)
        if options.steps
        else gradient_columns(pairs, options.ranks)
    )
    print(table(columns))
    ours = [float(column[pair]) for column in columns.values() for pair in pairs]
    print(f"\n{len(pairs)} pairs; largest difference {max(ours):.1e}")
    return int(max(ours) > 1e-10)


def gradient_columns(pairs: Sequence[Pair], ranks: Iterable[int]) -> dict[str, dict[Pair, str]]:
    """Return the table of gradients, with the rows of open_clip."""
    expected = {pair: gradients(pair, 1) for pair in pairs}
    peer = open_clip_gradients(1)
    columns: dict[str, dict[Pair, str]] = {}
    for size in ranks:
        for parts in (1, PARTS):
            actual, peer_actual = on_ranks(size, _all_gradients, pairs, parts)
            name = f"{size} rank{'s' * (size > 1)}" + ", micro-batches" * (parts > 1)
            columns[name] = {pair: f"{difference(actual[pair], expected[pair]):.0e}" for pair in pairs}
            for (flags, recommended), values in zip(OPEN_CLIP.items(), peer_actual, strict=True):
                errors = _by_part(values, peer, None if recommended else size)
                columns[name] |= {(flags, part): f"{error:.1g}" for part, error in errors.items()}
    return columns


def training_columns(pairs: Sequence[Pair], ranks: Iterable[int], steps: int) -> dict[str, dict[Pair, str]]:
    """Return the table of trainings that share the weights in different ways."""
    expected = {pair: training(pair, steps, 1, None) for pair in pairs}
    whole = bytes_of_encoder(None, World())
    columns: dict[str, dict[Pair, str]] = {}
    for size in ranks:
        for name, (held, actual) in on_ranks(size, _trainings, pairs, steps).items():
            columns[name] = {pair: f"{difference(actual[pair], expected[pair]):.0e}" for pair in pairs}
            columns[name]["share of weights and optimizer state", ""] = f"{held / whole:.3f}"
    return columns


def sharing(ranks: int) -> dict[str, int | None]:
    """Return the ways in which ranks share the weights: name -> number of ranks that divide them, None for DDP."""
    return {"ddp": None, "fsdp": ranks} | ({"hybrid": ranks // 2} if ranks > 2 else {})


def training(
    pair: Pair, steps: int, parts: int, group: int | None, world: World = World(), recipe: Optimizer | None = None
) -> Gradients:
    """Return the losses of a training, and the gradients and the objective's state in its last step, whole.

    group: number of ranks that divide the weights; None for DDP. recipe: optimizer recipe; None for AdamW.
    """
    model, objective = _built(_config(*pair), block_encoder)
    share = BATCH // world.size
    parallel = _parallel(model, world, group)
    cache = GradientCache(model, objective, world, share // parts, parallel=parallel)
    optimizer = (recipe or adam(1e-2)).build(parallel.trained, objective)
    values: Gradients = {}
    for step in range(steps):
        optimizer.zero_grad()
        model.head.resample(step)
        loss = cache(_batch(step).split(share)[world.rank], Progress(step, 10, SAMPLES, BATCH))
        values[f"loss {step}"] = world.mean(loss.total)
        trained = [p for part in (parallel.trained, objective) for p in part.parameters() if p.grad is not None]
        parallel.clip_gradient_(trained, CLIP, parallel.gradient_norm(trained))
        with parallel.stepping(optimizer):
            optimizer.step()
        model.head.clamp_()
    return values | _gradients_and_state(parallel.trained, objective)


def gradients(pair: Pair, parts: int, world: World = World()) -> Gradients:
    """Every parameter's gradient after two batches, on this rank's share in `parts` micro-batches; and the state."""
    model, objective = _built(_config(*pair), small_encoder)
    share = BATCH // world.size
    cache = GradientCache(model, objective, world, share // parts)
    for step in range(2):  # DDP rebuilds its buckets after the first; per-sample state matters in the second
        model.zero_grad()
        objective.zero_grad()
        model.head.resample(step)
        cache(_batch(step).split(share)[world.rank], Progress(step, 10, SAMPLES, BATCH))
    return _gradients_and_state(model, objective)


def _built(plain: dict[str, Any], encoder: Callable[[], Encoder]) -> tuple[Model, Objective]:
    torch.manual_seed(0)
    model = Model(encoder(), build.build_head(plain)).double()
    objective = build.build_objective(plain).double()
    objective.allocate(SAMPLES)
    return model, objective


def _gradients_and_state(model: nn.Module, objective: nn.Module) -> Gradients:
    both = nn.ModuleDict({"model": model, "objective": objective})
    named: dict[str, Any] = {name: p.grad for name, p in both.named_parameters() if p.grad is not None}
    values = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in named.items()}
    values |= {f"state {name}": value for name, value in objective.named_buffers()}
    return {name: value.clone() for name, value in values.items()}


def compatible_pairs(heads: Iterable[str] | None = None) -> list[Pair]:
    """Compatible pairs of a head and an objective of conf/ that need no teacher."""
    built_heads = {name: build.build_head(_part("head", name)) for name in heads or _names("head")}
    objectives = {name: build.build_objective(_part("objective", name)) for name in _names("objective")}
    return [
        (head_name, objective_name)
        for (head_name, head), (objective_name, objective) in product(built_heads.items(), objectives.items())
        if check_pair(head, objective).compatible and not (head.needs_teacher or objective.needs_teacher)
    ]


def _parallel(model: Model, world: World, group: int | None) -> Parallel[Model]:
    if group is None or world.size == 1:
        return Parallel(model, world)
    from clipzoo.distributed.sharded import Sharded

    return Sharded(model, world, [model.head], group)


def bytes_of_encoder(group: int | None, world: World) -> int:
    """Return the bytes of weights and of AdamW's state of an encoder that this rank holds.

    Two and four ranks divide a dimension of every parameter, as they do with the towers of published models.
    """
    image, text = EVEN
    plain = _config("clip", "infonce")
    plain = {**plain, "head": {**plain["head"], "image_width": image, "text_width": text}}
    model, objective = _built(plain, lambda: block_encoder(EVEN, hidden=(64, 32)))
    parallel = _parallel(model, world, group)
    cache = GradientCache(model, objective, world, parallel=parallel)
    optimizer = adam(1e-2).build(parallel.trained.encoder)
    cache(_batch(0).split(BATCH // world.size)[world.rank], Progress(0, 10, SAMPLES, BATCH))
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*parallel.trained.encoder.parameters(), *states]
    if parallel.trained is not model:
        tensors += model.encoder.parameters()
    return sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors)


def open_clip_gradients(parts: int, world: World = World(), recommended: bool = False) -> Gradients:
    """Return gradients of the batch under open_clip's loss, by default with the default flags of its program."""
    from open_clip.loss import ClipLoss

    torch.manual_seed(0)
    model: Any = OpenClipLike().double()
    loss = ClipLoss(recommended, recommended, rank=world.rank, world_size=world.size)
    if world.size > 1:
        model = DistributedDataParallel(model)
    local = _batch(0).split(BATCH // world.size)[world.rank]
    shares = local.split(len(local) // parts)
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


class TwoTowers(Encoder):
    """Towers of tokens, and captions of different lengths. towers: [b, M, inputs] -> [b, M, width]."""

    def __init__(self, widths: tuple[int, int], image_tower: nn.Module, text_tower: nn.Module) -> None:
        super().__init__()
        self.image_width, self.text_width = widths
        self.image_tower, self.text_tower = image_tower, text_tower

    def image(self, image: Tensor) -> Features:
        tokens = self.image_tower(image.unflatten(2, (2, 2)).transpose(1, 2).flatten(2))  # [b, 2, image_width]
        return Features(tokens.mean(dim=1), tokens)

    def text(self, text: Tensor) -> Features:
        mask = (text == END).cumsum(dim=1) - (text == END).int() == 0
        tokens = self.text_tower(text)
        return Features((tokens * mask[..., None]).sum(dim=1), tokens, mask)


def small_encoder() -> TwoTowers:
    image = nn.Sequential(nn.Linear(12, IMAGE_WIDTH), nn.Tanh())
    text = nn.Sequential(nn.Embedding(END + 1, TEXT_WIDTH), nn.Linear(TEXT_WIDTH, TEXT_WIDTH), nn.Tanh())
    return TwoTowers((IMAGE_WIDTH, TEXT_WIDTH), image, text)


def block_encoder(widths: tuple[int, int] = (IMAGE_WIDTH, TEXT_WIDTH), hidden: tuple[int, int] = (30, 22)) -> TwoTowers:
    """Towers of residual blocks. hidden: widths inside of the blocks; four ranks do not divide the default sizes."""
    image = BlockTower(nn.Linear(12, widths[0]), widths[0], hidden[0])
    return TwoTowers(widths, image, BlockTower(nn.Embedding(END + 1, widths[1]), widths[1], hidden[1]))


class BlockTower(nn.Module):
    """A stem and three blocks."""

    def __init__(self, stem: nn.Module, width: int, hidden: int) -> None:
        super().__init__()
        self.stem, self.norm = stem, nn.LayerNorm(width)
        layers = (nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width)) for _ in range(3))
        self.blocks = nn.ModuleList(layers)

    def forward(self, inputs: Tensor) -> Tensor:
        states = self.stem(inputs)
        for block in self.blocks:
            states = states + block(states)
        return self.norm(states)


class OpenClipLike(nn.Module):
    """The inputs of open_clip's losses: unit vectors of both towers and the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = small_encoder()
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


def _by_part(actual: Gradients, expected: Gradients, ranks: int | None) -> dict[str, float]:
    """Relative differences of the towers' gradients, also multiplied by `ranks`, and of the temperature's."""
    scale = "logit_scale"
    factors = {"InfoNCE: towers": 1} | ({"InfoNCE: towers x ranks": ranks} if ranks else {})
    towers = [name for name in expected if name != scale]
    errors = {
        row: max(_difference(factor * actual[name], expected[name]) for name in towers)
        for row, factor in factors.items()
    }
    return errors | {"InfoNCE: temperature": _difference(actual[scale], expected[scale])}


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the first rank's `function(world, *arguments)`, called in `ranks` new processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers: Any = multiprocessing.get_context("spawn").SimpleQueue()
    ended = multiprocessing.spawn(_rank, (answers, ranks, port, function, arguments), ranks, join=False, daemon=True)
    answer = pickle.loads(answers.get())
    ended.join()
    return answer


def _rank(rank: int, answers: Any, ranks: int, port: int, function: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    names = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    world = World.join("cpu", 300)
    values = function(world, *arguments)
    if rank == 0:
        # By value: tensors sent as shared memory would die with this process.
        answers.put(pickle.dumps(values))
    # The store ends with the first rank.
    with suppress(dist.DistError):
        world.barrier()
    # gloo with DDP may abort in its destructors.
    sys.stderr.flush()
    os._exit(0)


def _all_gradients(world: World, pairs: Sequence[Pair], parts: int) -> tuple[dict[Pair, Gradients], list[Gradients]]:
    peers = [open_clip_gradients(parts, world, recommended) for recommended in OPEN_CLIP.values()]
    return {pair: gradients(pair, parts, world) for pair in pairs}, peers


def _trainings(world: World, pairs: Sequence[Pair], steps: int) -> dict[str, tuple[int, dict[Pair, Gradients]]]:
    """Return the bytes that this rank holds and the trainings of all pairs, by the name of a column."""
    return {
        f"{name}, {world.size} ranks" + ", micro-batches" * (parts > 1): (
            bytes_of_encoder(group, world),
            {pair: training(pair, steps, parts, group, world) for pair in pairs},
        )
        for name, group in sharing(world.size).items()
        for parts in (1, PARTS)
    }


def _options() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=number_in(Count), nargs="+", help="1 2 4; 2 4 with --steps")
    parser.add_argument("--heads", nargs="+", help="only these")
    parser.add_argument("--steps", type=number_in(Count), help="compare trainings of so many steps, with ddp and fsdp")
    options = parser.parse_args()
    options.ranks = options.ranks or ([2, 4] if options.steps else [1, 2, 4])
    return options


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    torch.set_num_threads(1)
    run_main(main)
