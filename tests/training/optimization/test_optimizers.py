"""Optimizers make their libraries' steps, on the groups that all of them share, and resume exactly."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from timm.optim import create_optimizer_v2
from torch import nn

from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.training.optimizers import (
    FACTOR,
    SGD,
    Adafactor,
    AdamW,
    AdamW8bit,
    GroupedOptimizer,
    Muon,
    TimmOptimizer,
    adam,
    decay_groups,
    hidden_matrices,
    scale_rates,
    split_groups,
)
from clipzoo.training.schedules import Linear
from clipzoo.types import Progress
from scripts.compatibility import build_head, build_objective, config_names
from scripts.gradient_parity import difference, training
from tests.support.ranks import run_ranks
from tests.support.runs import assert_equal

RATE = Linear(1e-2, 0.0, 0.0, None, 0, None, False)
TIMM = partial(TimmOptimizer, betas=None, options={}, weight_decay=0.3, schedule=RATE)
OPTIMIZERS: dict[str, GroupedOptimizer] = {
    "adamw": AdamW([0.9, 0.98], 1e-8, weight_decay=0.3, schedule=RATE),
    "sgd": SGD(0.9, True, weight_decay=0.3, schedule=RATE),
    "adafactor": Adafactor(-0.8, None, 1e-3, 1.0, weight_decay=0.3, schedule=RATE),
    "muon": Muon(0.95, True, 5, "match_rms_adamw", 0.5, [0.9, 0.98], 1e-8, weight_decay=0.3, schedule=RATE),
    "lion": TIMM(name="lion", betas=[0.9, 0.98]),
    "lamb": TIMM(name="lamb", options={"trust_clip": True}),
    "lookahead_adan": TIMM(name="lookahead_adan"),
}
STEPS = 6


class Network(nn.Module):
    """Layers of every kind that the groups tell apart."""

    def __init__(self, embeddings: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(embeddings, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.linear = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        features = self.embedding(tokens)
        return self.scale * self.head(self.norm(self.linear(self.attention(features, features, features)[0])))


def loss(network: Network, step: int) -> torch.Tensor:
    tokens = torch.randint(5, (3, 4), generator=torch.Generator().manual_seed(step))
    return network(tokens).square().mean()


def trained(recipe: GroupedOptimizer, network: Network, optimizer: torch.optim.Optimizer, first=0, last=STEPS):
    """Train with the schedule of the recipe; return the weights."""
    for step in range(first, last):
        recipe.set_rate(optimizer, Progress(step, STEPS, 100, 10))
        scale_rates(optimizer, {})
        optimizer.zero_grad()
        loss(network, step).backward()
        optimizer.step()
    return network.state_dict()


def library_optimizers(name: str, network: Network) -> list[torch.optim.Optimizer]:
    """The optimizers of torch and timm with the arguments of OPTIMIZERS."""
    groups = decay_groups(network.parameters(), 0.3)
    if name == "muon":
        matrices = [network.attention.in_proj_weight, network.attention.out_proj.weight, network.linear.weight]
        others = [p for p in network.parameters() if not any(p is matrix for matrix in matrices)]
        return [
            torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.3, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(decay_groups(others, 0.3), lr=5e-3, betas=(0.9, 0.98), fused=True),
        ]
    constructors = {
        "adamw": partial(torch.optim.AdamW, groups, betas=(0.9, 0.98), fused=True),
        "sgd": partial(torch.optim.SGD, groups, momentum=0.9, nesterov=True),
        "adafactor": partial(torch.optim.Adafactor, groups),
        # timm makes its own groups of a module; LAMB's norm of the gradient is summed in the order of the groups.
        "lion": partial(create_optimizer_v2, network, "lion", weight_decay=0.3, betas=(0.9, 0.98)),
        "lamb": partial(create_optimizer_v2, groups, "lamb", trust_clip=True),
        "lookahead_adan": partial(create_optimizer_v2, network, "lookahead_adan", weight_decay=0.3),
    }
    return [constructors[name](lr=1e-2)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_the_library(name):
    network, recipe = Network(), OPTIMIZERS[name]
    ours = trained(recipe, network, recipe.build(network))
    theirs = Network()
    optimizers = library_optimizers(name, theirs)
    factors = [[group["lr"] / RATE.peak for group in optimizer.param_groups] for optimizer in optimizers]
    for step in range(STEPS):
        loss(theirs, step).backward()
        for optimizer, own in zip(optimizers, factors, strict=True):
            for group, factor in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = RATE(Progress(step, STEPS, 100, 10)) * factor
            optimizer.step()
            optimizer.zero_grad()
        theirs.zero_grad()
    assert all((value != Network().state_dict()[key]).any() for key, value in ours.items())
    assert_equal(ours, theirs.state_dict())


def reloaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_resumes_from_the_state_exactly_also_with_groups_that_are_split(name):
    recipe = OPTIMIZERS[name]

    def new():
        network = Network()
        optimizer = recipe.build(network)
        split_groups(optimizer, {network.linear.weight: 0.5, network.norm.bias: 0.5}, {})
        return network, optimizer

    whole = trained(recipe, *new())
    network, optimizer = new()
    weights, state = reloaded([trained(recipe, network, optimizer, last=3), optimizer.state_dict()])
    network, optimizer = new()
    network.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert_equal(trained(recipe, network, optimizer, first=3), whole)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_optimizers_have_the_same_groups(name):
    network = Network()
    optimizer = OPTIMIZERS[name].build(network)
    split_groups(optimizer, {network.linear.weight: 0.1, network.norm.bias: 0.1}, {})
    OPTIMIZERS[name].set_rate(optimizer, Progress(0, STEPS, 100, 10))
    scale_rates(optimizer, {})
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tuned = 0.1 if parameter is network.linear.weight or parameter is network.norm.bias else 1.0
            own = 0.5 if group.get("algorithm") == "adamw" else 1.0
            assert group["lr"] == pytest.approx(1e-2 * tuned * own) and group.get(FACTOR, 1.0) == tuned * own
            assert group["weight_decay"] == (0.3 if parameter.ndim >= 2 else 0.0)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(network.parameters()))


def test_muon_trains_the_matrices_of_hidden_layers_and_adamw_the_rest():
    network = Network()
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    trains = {
        names[id(parameter)]: group["algorithm"]
        for group in OPTIMIZERS["muon"].build(network).param_groups
        for parameter in group["params"]
    }
    matrices = {"attention.in_proj_weight", "attention.out_proj.weight", "linear.weight"}
    assert {name for name, algorithm in trains.items() if algorithm == "muon"} == matrices
    assert trains.keys() == set(names.values())
    assert len(hidden_matrices(network)) == len(matrices)
    groups = OPTIMIZERS["muon"].build(build_head("clip")).param_groups
    assert {group["algorithm"] for group in groups} == {"adamw"}, "a head has no hidden matrix"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "lyon"}, "timm has no optimizer optim.name=lyon; did you mean lion?"),
        ({"name": "xyzzy"}, "timm has no optimizer optim.name=xyzzy: timm.optim.list_optimizers\\(\\) lists them"),
        ({"name": "adahessian"}, "optim.name=adahessian needs second derivatives"),
        ({"name": "kron"}, "optim.name=kron draws random numbers that no checkpoint holds"),
        ({"name": "lion", "options": {"cautious": True}}, "optim.name=lion: .*unexpected keyword argument 'cautious'"),
    ],
)
def test_an_optimizer_that_timm_does_not_have_is_one_message(change, message):
    with pytest.raises(ConfigError, match=message):
        TIMM(**change)


def test_eight_bit_state_without_bitsandbytes_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"needs bitsandbytes: pip install -e .*\[bitsandbytes\]"):
        AdamW8bit([0.9, 0.98], 1e-8, weight_decay=0.3, schedule=RATE)


def test_a_step_never_takes_away_more_than_the_weight():
    for recipe in OPTIMIZERS.values():
        with pytest.raises(ConfigError, match="a step must not take away more than the whole weight"):
            replace(recipe, weight_decay=200.0)


@pytest.mark.parametrize("name", config_names("head"))
def test_no_temperature_or_gamma_of_a_head_or_an_objective_decays(name):
    head, objective = build_head(name), build_objective("siglip", "objective.initial_scale=10.0")
    groups = AdamW([0.9, 0.98], 1e-8, weight_decay=0.5, schedule=RATE).build(head, objective).param_groups
    decay = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    for key, parameter in (*head.named_parameters(), *objective.named_parameters()):
        if parameter.requires_grad:
            assert decay[id(parameter)] == (0.5 if parameter.dim() == 2 else 0.0), key
        else:
            assert id(parameter) not in decay, key


@pytest.mark.medium
def test_eight_bit_state_takes_the_steps_of_bitsandbytes_and_resumes_from_its_state_exactly():
    bitsandbytes = pytest.importorskip("bitsandbytes")

    recipe = AdamW8bit([0.9, 0.98], 1e-8, weight_decay=0.3, schedule=RATE)
    theirs, whole, resumed = (Network(embeddings=512) for _ in range(3))
    library = bitsandbytes.optim.AdamW8bit(decay_groups(theirs.parameters(), 0.3), lr=1e-2, betas=(0.9, 0.98))
    expected = trained(recipe, theirs, library)
    assert_equal(trained(recipe, whole, recipe.build(whole)), expected)
    half, again = recipe.build(resumed), recipe.build(resumed)
    trained(recipe, resumed, half, last=3)
    again.load_state_dict(reloaded(half.state_dict()))
    assert_equal(trained(recipe, resumed, again, first=3), expected)
    assert not torch.equal(resumed.embedding.weight, Network(embeddings=512).embedding.weight)
    (moments,) = (state["state1"] for state in again.state.values() if state["state1"].numel() == 512 * 8)
    assert moments.dtype is torch.uint8


PAIR = ("clip", "infonce")
EQUAL = ("adan", "adopt", "lars", "lion", "nadamw", "radam")
REFUSED = ("adamp", "cadamw", "lamb", "mars", "novograd")


def outcome(name: str, group: int | None, world: World):
    recipe = TimmOptimizer(name=name, betas=None, options={}, weight_decay=0.05, schedule=adam(1e-2).schedule)
    try:
        return training(PAIR, 4, 1, group, world, recipe)
    except ConfigError as error:
        return str(error)


def outcomes(names: tuple[str, ...]):
    world = World.from_process_group()
    return {name: (outcome(name, None, world), outcome(name, 2, world)) for name in names}


@pytest.mark.slow
def test_optimizers_of_timm_train_alike_with_ddp_and_fsdp_or_are_refused():
    for found in run_ranks(2, outcomes, (*EQUAL, *REFUSED)):
        for name in EQUAL:
            assert difference(*found[name]) < 1e-10, name
        for name in REFUSED:
            message = found[name][1]
            assert "cannot update weights that ranks divide" in message and "trainer.parallel=ddp" in message, name
            assert "\n" not in message
