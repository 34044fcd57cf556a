"""Weights, gradients and optimizer state divided among ranks: torch's `fully_shard` (FSDP2).

Each block of the encoder is a unit: its weights are gathered before its forward and backward pass and freed afterwards.
Everything outside of the blocks (embeddings, last norms) is one more unit. Parameters of other modules, such as a head,
stay whole on every rank.
"""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from clipzoo.distributed.parallel import OTHER_RANKS, OWN_PASSES, M, Mark, Parallel, by_kind, on_gradient
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError, first_line


def twin(model: M, kept: Iterable[object] = ()) -> M:
    """Return a copy of the model's modules with the same parameters, buffers and `kept` modules or other objects."""
    shared = [*model.parameters(), *model.buffers(), *kept]
    return copy.deepcopy(model, {id(item): item for item in shared})


class Sharded(Parallel[M]):
    """Divides the weights of the encoder among groups of ranks; the groups hold copies of each other.

    `trained` is a twin of `model`: its parameters are DTensors, of which this rank holds a shard. Those of `model` are
    empty except inside `whole` and after `finish`, so that evaluation and checkpoints see an ordinary model.

    kept: objects inside the model that `model` and `trained` share, such as the head.
    ranks: number of consecutive ranks that divide the weights. With fewer than all, the gradients of the groups are
    averaged (hybrid sharding).
    reshard: free the weights of a block after its forward pass; the backward pass gathers them again.
    offload: keep shards, their gradients and the optimizer's state in main memory.

    Weights and gradients travel in their own precision: autocast lowers that of the products, as it does with copies.
    """

    equal_passes = True

    def __init__(
        self, model: M, world: World, kept: Iterable[object], ranks: int, reshard: bool = True, offload: bool = False
    ) -> None:
        super().__init__(model, world)
        self._ranks, self._reshard, self._offload = ranks, reshard, offload
        # Consecutive ranks divide the weights; corresponding ranks of the groups hold the same shard.
        shape = {"shard": ranks} if ranks == world.size else {"replicate": world.size // ranks, "shard": ranks}
        self._mesh = init_device_mesh(world.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
        self.trained = twin(model, kept)
        # Parameters of `model` and their counterparts in `trained`, with the strides of the whole tensors.
        self._shards: list[tuple[nn.Parameter, Any, tuple[int, ...]]] = []
        self._units: list[nn.Module] = []
        self._is_whole = False

    def wrap(self, encoder: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        names = {id(parameter): name for name, parameter in self.trained.named_parameters()}
        encoder_parameters = {names[id(parameter)]: parameter for parameter in encoder.parameters()}
        strides = {name: parameter.stride() for name, parameter in encoder_parameters.items()}
        users: dict[nn.Parameter, set[nn.Module]] = {}
        for module in encoder.modules():
            for parameter in module.parameters(recurse=False):
                users.setdefault(parameter, set()).add(module)
        # Blocks to gather separately: those with matrices that share no parameter with other modules.
        for block in blocks:
            modules, parameters = set(block.modules()), list(block.parameters())
            if any(p.ndim > 1 for p in parameters) and all(users[p] <= modules for p in parameters):
                self._units.append(block)
        self._units.append(encoder)
        device = self.world.device
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if self._offload else OffloadPolicy()

        def placement(parameter: nn.Parameter) -> Shard:
            # The first dimension that the ranks divide evenly: every rank then holds as much as the others.
            return Shard(next((place for place, size in enumerate(parameter.shape) if size % self._ranks == 0), 0))

        for unit in self._units:
            parameters = [parameter for parameter in unit.parameters() if not isinstance(parameter, DTensor)]
            for parameter in parameters:
                parameter.data = parameter.data.to(device).contiguous()
            self.world.broadcast_(parameter.detach() for parameter in parameters)
            if self._offload:
                for parameter in parameters:
                    parameter.data = parameter.data.cpu()
            fully_shard(
                unit, mesh=self._mesh, reshard_after_forward=self._reshard, shard_placement_fn=placement,
                mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), offload_policy=offload,
            )  # fmt: skip
            # Free the casts of weights that autocast keeps for a second use: a unit is used once in a pass.
            unit.register_forward_hook(torch.compiler.disable(lambda *_: torch.clear_autocast_cache()))
        trained = dict(self.trained.named_parameters())
        self._shards = [(whole, trained[name], strides[name]) for name, whole in encoder_parameters.items()]
        self._free()
        # Features are views of the last norm's output; nothing changes them in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self._encoder = encoder
        return encoder

    def time_passes(self, mark: Mark) -> None:
        """Mark the waits for the weights of every unit: its FSDP hooks run between the two forward pre-hooks below.

        In the backward pass they run between the gradient of a unit's input and that of the previous unit's output.
        """

        @torch.compiler.disable
        def before_wait(module: nn.Module, arguments: object) -> None:
            mark(OWN_PASSES)

        @torch.compiler.disable
        def after_wait(module: nn.Module, arguments: object) -> None:
            mark(OTHER_RANKS)
            on_gradient(arguments, lambda: mark(OWN_PASSES))

        @torch.compiler.disable
        def after_pass(module: nn.Module, arguments: object, output: object) -> None:
            on_gradient(output, lambda: mark(OTHER_RANKS))

        for unit in self._units:
            unit.register_forward_pre_hook(before_wait, prepend=True)
            unit.register_forward_pre_hook(after_wait)
            unit.register_forward_hook(after_pass)

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        # Gradients are summed as shards, within a group in every micro-batch and over the groups in the last one.
        assert isinstance(self._encoder, FSDPModule)
        self._encoder.set_requires_all_reduce(last)
        self._encoder.set_is_last_backward(last)
        yield

    def end_step(self) -> None:
        # Weights gathered by a forward pass without a backward pass are not freed otherwise.
        assert self._encoder is not None
        for module in self._encoder.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def trained_parameters(self, values: Mapping[nn.Parameter, float]) -> dict[nn.Parameter, float]:
        counterparts = {whole: parameter for whole, parameter, _ in self._shards}
        return {counterparts.get(parameter, parameter): value for parameter, value in values.items()}

    def scaler(self, enabled: bool) -> torch.amp.GradScaler:
        return ShardedScaler(self.world, enabled)

    def gradient_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        device, groups = self.world.device, self.world.size // self._ranks
        whole = nn.utils.get_total_norm([gradient for gradient in gradients if not isinstance(gradient, DTensor)])
        shards = nn.utils.get_total_norm([part.to_local() for part in gradients if isinstance(part, DTensor)])
        of_encoder = self.world.sum(shards.to(device).square()) / groups
        return (of_encoder + whole.to(device).square()).sqrt()

    @contextmanager
    def stepping(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Split the parameter groups for the step: torch cannot update shards together with whole tensors."""
        groups = optimizer.param_groups
        parts = [(group, {**group, "params": kind}) for group in groups for kind in by_kind(group["params"])]
        optimizer.param_groups = [part for _, part in parts]
        try:
            yield
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
            by_shards = "DTensor" in str(error) or any("torch/distributed/tensor/" in file for file in files)
            if isinstance(error, torch.OutOfMemoryError) or not by_shards:
                raise
            raise ConfigError(
                f"{type(optimizer).__name__} cannot update weights that ranks divide ({first_line(error)}): choose "
                "another optimizer, or trainer.parallel=ddp"
            ) from error
        finally:
            optimizer.param_groups = groups
            for group, part in parts:
                group.update((key, value) for key, value in part.items() if key != "params")

    @contextmanager
    def whole(self) -> Iterator[M]:
        if self._is_whole:
            yield self.model
            return
        self.finish()
        try:
            yield self.model
        finally:
            self._free()

    @torch.no_grad()
    def load_whole(self) -> None:
        for whole, parameter, _ in self._shards:
            local, mesh = parameter.to_local(), parameter.device_mesh
            values = whole.detach().to(local.device)
            shard = distribute_tensor(values, mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(shard.to(local.dtype))

    def whole_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        whole = {}
        for key, value in state.items():
            if isinstance(value, Mapping):
                value = self.whole_state(value)
            elif isinstance(value, DTensor):
                gathered = _gathered(value, self.world.device)
                value = gathered.cpu() if self.world.is_first else None
            whole[key] = value
        return whole

    def finish(self) -> None:
        self._is_whole = True
        for whole, parameter, stride in self._shards:
            values = _gathered(parameter.detach(), self.world.device)
            whole.data = torch.empty_strided(values.shape, stride, dtype=values.dtype, device=values.device)
            whole.data.copy_(values)

    def _free(self) -> None:
        self._is_whole = False
        for whole, _, _ in self._shards:
            whole.data = torch.empty(0, dtype=whole.dtype, device=self.world.device)


def _gathered(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the whole tensor on a device. Collective."""
    on_device: Any = tensor.to(device)
    return on_device.full_tensor()


class ShardedScaler(torch.amp.GradScaler):
    """Loss scaling of fp16 that skips a step on all ranks if a gradient is infinite on one."""

    def __init__(self, world: World, enabled: bool) -> None:
        super().__init__(world.device.type, enabled=enabled)
        self._world = world

    def _unscale_grads_(self, optimizer: Any, *arguments: Any) -> dict[torch.device, Tensor]:
        # torch cannot unscale shards together with whole tensors: it gets plain tensors with the local gradients.
        tensors = []
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter.grad is not None:
                local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                tensor = local.detach()
                tensor.grad = local
                tensors.append(tensor)
        local_optimizer: Any = SimpleNamespace(param_groups=[{"params": tensors}])
        infinite = super()._unscale_grads_(local_optimizer, *arguments)
        return {device: self._world.maximum(value) for device, value in infinite.items()}
