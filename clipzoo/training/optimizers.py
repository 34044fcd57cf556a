"""Optimizers: parameter groups, learning rates of parts of a model, and the optimizers of torch, timm and others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import nn

from clipzoo.errors import ConfigError, first_line, imported, nearest
from clipzoo.training.parts import Schedule
from clipzoo.training.schedules import Cosine
from clipzoo.types import Decay, Epsilon, NonNegative, Part, Positive, Progress, Range, checked

Group = dict[str, Any]
"""A parameter group of torch: "params" and the values that differ from the optimizer's."""
FACTOR, ALGORITHM = "rate_factor", "algorithm"
"""Keys of a parameter group: the factor of its learning rate, and the name of the optimizer that trains it."""


@dataclass(frozen=True, kw_only=True)
class GroupedOptimizer(Part):
    """Base class of the optimizers: a schedule, and weight decay for matrices, not for biases, norms and scales.

    Factors of the learning rate, per tower and per layer, split the groups (`split_groups`).

    weight_decay: weight decay of matrices.
    """

    weight_decay: NonNegative
    schedule: Schedule

    takes_shards = True
    """False if the optimizer cannot update weights that ranks divide (DTensors)."""

    relations = {
        "at_most(schedule.peak * weight_decay, 1)": (
            "a step must not take away more than the whole weight: lower one of them"
        )
    }

    def build(self, *modules: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer over all parameters of the modules that require a gradient."""
        parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        return self.construct(decay_groups(parameters, self.weight_decay))

    @abstractmethod
    def construct(self, groups: list[Group]) -> torch.optim.Optimizer:
        """Return the library's optimizer over the groups, with the peak of the schedule as its learning rate."""

    def set_rate(self, optimizer: torch.optim.Optimizer, progress: Progress) -> float:
        """Set the learning rate of the coming step and return it."""
        rate = self.schedule(progress)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate

    def require_constructible(self, key: str) -> None:
        """Raise ConfigError, with the library's reason, if it cannot construct the optimizer. key: for the message."""
        try:
            self.construct([{"params": [nn.Parameter(torch.zeros(2, 2))], "weight_decay": self.weight_decay}])
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{key}: {first_line(error)}") from error


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[Group]:
    """Return two groups: matrices with weight decay, and parameters of fewer than two dimensions without."""
    parameters = list(parameters)
    matrices = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def split_groups(
    optimizer: torch.optim.Optimizer, factors: Mapping[nn.Parameter, float], rates: Mapping[nn.Parameter, float]
) -> None:
    """Split the groups of a new optimizer: one factor in a group, and a group for each parameter in `rates`."""
    if not factors and not rates:
        return
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        parts: dict[tuple[float, nn.Parameter | None], list[nn.Parameter]] = {}
        for parameter in group["params"]:
            key = factors.get(parameter, 1.0), parameter if parameter in rates else None
            parts.setdefault(key, []).append(parameter)
        scale = group.get(FACTOR, 1.0)
        groups += [{**group, "params": members, FACTOR: scale * factor} for (factor, _), members in parts.items()]
    optimizer.param_groups[:] = groups


def scale_rates(optimizer: torch.optim.Optimizer, rates: Mapping[nn.Parameter, float]) -> None:
    """Multiply the learning rate of each group, which has been set for the coming step, by the group's factor.

    rates: learning rates of parameters that follow neither the schedule nor a factor.
    """
    for group in optimizer.param_groups:
        if FACTOR in group:
            group["lr"] = rates.get(group["params"][0], group["lr"] * group[FACTOR])


@checked
@dataclass(frozen=True)
class AdamW(GroupedOptimizer):
    """torch's fused AdamW, without weight decay for parameters of fewer than two dimensions (biases, norms, scales).

    betas: decay rates of the first and the second moment. eps: added to the root of the second moment.
    """

    betas: tuple[Decay, Decay]
    eps: Epsilon

    def construct(self, groups: list[Group]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, self.schedule.peak, (self.betas[0], self.betas[1]), self.eps, fused=True)


@checked
@dataclass(frozen=True)
class AdamW8bit(AdamW):
    """AdamW of bitsandbytes: 8-bit moments for tensors of at least 4096 elements (Dettmers et al. 2022)."""

    takes_shards = False

    def __post_init__(self) -> None:
        self.require_constructible("optim=adamw_8bit")

    def construct(self, groups: list[Group]) -> torch.optim.Optimizer:
        bitsandbytes = imported("bitsandbytes", "optim=adamw_8bit needs", "bitsandbytes")
        return bitsandbytes.optim.AdamW8bit(groups, self.schedule.peak, (self.betas[0], self.betas[1]), self.eps)


def adam(learning_rate: float, final_learning_rate: float = 0.0) -> AdamW:
    """Return Adam without weight decay, its learning rate falling along half a cosine."""
    schedule = Cosine(
        peak=learning_rate, start=learning_rate, end=final_learning_rate, warmup_epochs=None, warmup_steps=0,
        restart_epochs=None, per_epoch=False,
    )  # fmt: skip
    return AdamW(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, schedule=schedule)


@checked
@dataclass(frozen=True)
class SGD(GroupedOptimizer):
    """torch's stochastic gradient descent. Weight decay is added to the gradient, as in torch.

    momentum: weight of the earlier gradients. nesterov: look one step of the momentum ahead.
    """

    momentum: Decay
    nesterov: bool

    relations = {"momentum > 0 or not nesterov": "Nesterov's gradient needs momentum: raise it or give nesterov=false"}

    def construct(self, groups: list[Group]) -> torch.optim.SGD:
        return torch.optim.SGD(groups, lr=self.schedule.peak, momentum=self.momentum, nesterov=self.nesterov)


@checked
@dataclass(frozen=True)
class Adafactor(GroupedOptimizer):
    """torch's Adafactor (Shazeer and Stern 2018): second moments of matrices as row and column means, no first moments.

    The step of a tensor is the learning rate, at most 1 / sqrt(t), times the larger of eps2 and the tensor's root mean
    square. beta2_decay: exponent of t in 1 - t^beta2_decay, the decay of the second moments. eps1: null for the machine
    epsilon. clip: largest root mean square of an update before the learning rate.
    """

    beta2_decay: Annotated[float, Range(at_least=-10, at_most=0)]
    eps1: Epsilon | None
    eps2: Epsilon
    clip: Positive

    takes_shards = False

    def construct(self, groups: list[Group]) -> torch.optim.Adafactor:
        return torch.optim.Adafactor(
            groups, lr=self.schedule.peak, beta2_decay=self.beta2_decay, eps=(self.eps1, self.eps2), d=self.clip
        )


@checked
@dataclass(frozen=True)
class TimmOptimizer(GroupedOptimizer):
    """An optimizer of timm.

    name: as in `timm.optim.list_optimizers()`; lookahead_NAME wraps NAME in Lookahead. betas: decay rates
    of the moments; null for the optimizer's defaults. options: further arguments of the optimizer's class.
    """

    name: str
    betas: list[Decay] | None
    options: dict[str, Any]

    def __post_init__(self) -> None:
        from timm.optim import get_optimizer_info, list_optimizers

        name, names = self.name.lower().removeprefix("lookahead_"), [str(entry) for entry in list_optimizers()]
        if name not in names:
            hint = nearest(name, names) or ": timm.optim.list_optimizers() lists them"
            raise ConfigError(f"timm has no optimizer optim.name={self.name}{hint}")
        if get_optimizer_info(name).second_order:
            raise ConfigError(f"optim.name={self.name} needs second derivatives: choose another")
        self.require_constructible(f"optim.name={self.name}")

    def construct(self, groups: list[Group]) -> torch.optim.Optimizer:
        from timm.optim import create_optimizer_v2

        betas = {} if self.betas is None else {"betas": tuple(self.betas)}
        arguments: dict[str, Any] = {"weight_decay": self.weight_decay, **betas, **self.options}
        optimizer = create_optimizer_v2(groups, opt=self.name, lr=self.schedule.peak, **arguments)
        if hasattr(optimizer, "rng"):
            raise ConfigError(
                f"optim.name={self.name} draws random numbers that no checkpoint holds, so that a resumed run would be "
                "another one: choose another"
            )
        return optimizer


@checked
@dataclass(frozen=True)
class Muon(GroupedOptimizer):
    """torch's Muon (Jordan et al. 2024) for the weights of linear layers and attention, AdamW for all other parameters.

    AdamW trains embeddings, convolutions, the head's projections, norms, biases and scales.

    momentum: momentum of Muon. nesterov: use Nesterov's momentum. ns_steps: Newton-Schulz iterations.
    adjust_lr_fn: factor of the learning rate of an [A, B] matrix: "match_rms_adamw", .2 sqrt(max(A, B)), with which the
    learning rate and weight decay of AdamW suit Muon; "original", sqrt(max(1, A / B)).
    adamw_rate: factor of the learning rate of AdamW's parameters.
    betas: decay rates of AdamW's moments. eps: added to the root of its second moment.
    """

    momentum: Decay
    nesterov: bool
    ns_steps: Annotated[int, Range(at_least=1, at_most=99)]
    adjust_lr_fn: Literal["match_rms_adamw", "original"]
    adamw_rate: Positive
    betas: tuple[Decay, Decay]
    eps: Epsilon

    def build(self, *modules: nn.Module) -> torch.optim.Optimizer:
        matrices = {id(weight) for module in modules for weight in hidden_matrices(module)}
        parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        for_muon = [p for p in parameters if id(p) in matrices]
        for_adamw = [p for p in parameters if id(p) not in matrices]
        groups = [{**group, ALGORITHM: "muon"} for group in decay_groups(for_muon, self.weight_decay)]
        # A factor of 1 is left out, as in the groups of other optimizers.
        rate = {} if self.adamw_rate == 1 else {FACTOR: self.adamw_rate}
        groups += [{**group, ALGORITHM: "adamw", **rate} for group in decay_groups(for_adamw, self.weight_decay)]
        return self.construct(groups)

    def construct(self, groups: list[Group]) -> torch.optim.Optimizer:
        muon, adamw = ([group for group in groups if group[ALGORITHM] == name] for name in ("muon", "adamw"))
        optimizers: dict[str, torch.optim.Optimizer] = {}
        if muon:
            optimizers["muon"] = torch.optim.Muon(
                muon, lr=self.schedule.peak, momentum=self.momentum, nesterov=self.nesterov, ns_steps=self.ns_steps,
                adjust_lr_fn=self.adjust_lr_fn,
            )  # fmt: skip
        if adamw:
            peer = AdamW(self.betas, self.eps, weight_decay=self.weight_decay, schedule=self.schedule)
            optimizers["adamw"] = peer.construct(adamw)
        return CombinedOptimizer(optimizers)


class CombinedOptimizer(torch.optim.Optimizer):
    """Optimizers, by the value of `algorithm` in their groups, as one, with one list of groups and one state."""

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        super().__init__([group for inner in optimizers.values() for group in inner.param_groups], {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Make one step of every optimizer on its groups."""
        for name, inner in self._optimizers.items():
            # Groups may have been split, and groups and state replaced by those of a checkpoint.
            inner.param_groups = [group for group in self.param_groups if group[ALGORITHM] == name]
            inner.state = self.state
            inner.step()


def hidden_matrices(module: nn.Module) -> list[torch.Tensor]:
    """Return the weights of linear layers and the stacked input projections of attention, except those of the head."""
    linear = [
        (f"{name}.weight", inner.weight) for name, inner in module.named_modules() if isinstance(inner, nn.Linear)
    ]
    attention = [(name, weight) for name, weight in module.named_parameters() if name.endswith("in_proj_weight")]
    return [weight for name, weight in [*linear, *attention] if not name.startswith("head.")]
