"""Muon for the matrices of hidden layers, AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import nn

from clipzoo.training.optimization.groups import Group, GroupedOptimizer, decay_groups
from clipzoo.training.parts import Schedule
from clipzoo.training.tuning.rates import FACTOR
from clipzoo.types import Decay, Epsilon, NonNegative, Positive, Range, checked

ALGORITHM = "algorithm"
"""Key of a parameter group: the name of the optimizer that trains it."""


@checked
@dataclass(frozen=True)
class Muon(GroupedOptimizer):
    """torch's Muon (Jordan et al. 2024) for the weights of linear layers and attention, AdamW for all other parameters.

    Embeddings, convolutions, the head's projections, norms, biases and scales belong to AdamW.

    momentum: momentum of Muon. nesterov: use Nesterov's momentum. ns_steps: Newton-Schulz iterations.
    adjust_lr_fn: factor of the learning rate of an [A, B] matrix: "match_rms_adamw", .2 sqrt(max(A, B)), with which the
    rate and the weight decay of AdamW suit Muon; "original", sqrt(max(1, A / B)).
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
    weight_decay: NonNegative
    schedule: Schedule

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
        rate = self.schedule.peak
        return CombinedOptimizer(
            groups,
            {
                "muon": lambda own: torch.optim.Muon(
                    own, lr=rate, momentum=self.momentum, nesterov=self.nesterov, ns_steps=self.ns_steps,
                    adjust_lr_fn=self.adjust_lr_fn,
                ),
                "adamw": lambda own: torch.optim.AdamW(
                    own, lr=rate, betas=(self.betas[0], self.betas[1]), eps=self.eps, fused=True
                ),
            },
        )  # fmt: skip


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, with one list of parameter groups and one state.

    groups: each names its optimizer as `algorithm`. optimizers: constructors by that name.
    """

    def __init__(
        self, groups: list[Group], optimizers: Mapping[str, Callable[[list[Group]], torch.optim.Optimizer]]
    ) -> None:
        used = {name: [group for group in groups if group[ALGORITHM] == name] for name in optimizers}
        self._optimizers = {name: optimizers[name](own) for name, own in used.items() if own}
        super().__init__([group for inner in self._optimizers.values() for group in inner.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Make one step of every optimizer on its groups."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, inner in self._optimizers.items():
            # Groups may have been split, and groups and state replaced by those of a checkpoint.
            inner.param_groups = [group for group in self.param_groups if group[ALGORITHM] == name]
            inner.state = self.state
            inner.step()
        return loss


def hidden_matrices(module: nn.Module) -> list[torch.Tensor]:
    """Return the weights of linear layers and the stacked input projections of attention, those of a head left out."""
    linear = [
        (f"{name}.weight", inner.weight) for name, inner in module.named_modules() if isinstance(inner, nn.Linear)
    ]
    attention = [(name, weight) for name, weight in module.named_parameters() if name.endswith("in_proj_weight")]
    return [weight for name, weight in [*linear, *attention] if not name.startswith("head.")]
