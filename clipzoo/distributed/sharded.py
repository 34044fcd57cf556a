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
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from clipzoo.distributed.parallel import OTHER_RANKS, OWN_PASSES, Mark, Parallel, by_kind, on_gradient
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError, first_line

# Loss scaling of fp16 where ranks hold different gradients.


class ShardedScaler(torch.amp.GradScaler):
    """A GradScaler that skips a step on all ranks if a gradient is infinite on one."""

    def __init__(self, world: World, enabled: bool) -> None:
        super().__init__(world.device.type, enabled=enabled)
        self._world = world

    def _unscale_grads_(self, optimizer: Any, *arguments: Any) -> dict[torch.device, Tensor]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        # torch unscales no shards together with whole tensors.
        local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        stand_in: Any = SimpleNamespace(param_groups=[{"params": [_with_gradient(part) for part in local]}])
        found = super()._unscale_grads_(stand_in, *arguments)
        return {device: self._world.maximum(value) for device, value in found.items()}


def _with_gradient(gradient: Tensor) -> Tensor:
    """Return a tensor whose gradient this is."""
    tensor = gradient.detach()
    tensor.grad = gradient
    return tensor


# A second object for the same model: its modules are copies, its tensors are shared.


ModelType = TypeVar("M", bound=nn.Module)


def twin(model: ModelType, kept: Iterable[object] = ()) -> ModelType:
    """Return a copy of the model's modules with the same parameters and buffers.

    kept: modules and other objects inside the model that both share.
    """
    shared = [*model.parameters(), *model.buffers(), *kept]
    return copy.deepcopy(model, {id(item): item for item in shared})


M = TypeVar("M", bound=nn.Module)


class Sharded(Parallel[M]):
    """Divides the weights of the encoder among groups of ranks; the groups hold copies of each other.

    `trained` is a twin of `model`: its parameters are DTensors, of which this rank holds a shard. Those of `model` are
    empty but inside `whole` and after `finish`, so that evaluation and checkpoints see an ordinary model.

    kept: objects inside the model that `model` and `trained` share, such as the head.
    ranks: number of consecutive ranks that divide the weights. With fewer than all, the gradients of the groups are
    averaged (hybrid sharding).
    reshard: free the weights of a block after its forward pass; the backward pass gathers them again.
    offload: keep shards, their gradients and the optimizer's state in main memory.

    Weights and gradients travel in their own precision: autocast lowers that of the products, as it does with copies.
    """

    equal_passes = True

    def __init__(
        self,
        model: M,
        world: World,
        kept: Iterable[object],
        ranks: int,
        reshard: bool = True,
        offload: bool = False,
    ) -> None:
        super().__init__(model, world)
        self._ranks, self._reshard, self._offload = ranks, reshard, offload
        self._mesh = _mesh(world, ranks)
        self.trained = twin(model, kept)
        self._encoder: nn.Module | None = None
        self._shards: list[_Shard] = []
        self._units: list[nn.Module] = []
        self._is_whole = False

    def wrap(self, encoder: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        names = {id(parameter): name for name, parameter in self.trained.named_parameters()}
        wholes = {names[id(parameter)]: parameter for parameter in encoder.parameters()}
        strides = {name: parameter.stride() for name, parameter in wholes.items()}
        self._units = [*_units(encoder, blocks), encoder]
        for unit in self._units:
            self._shard(unit)
        trained = dict(self.trained.named_parameters())
        self._shards = [_Shard(whole, trained[name], strides[name]) for name, whole in wholes.items()]
        self._free()
        # Features are views of the last norm's output; nothing changes them in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self._encoder = encoder
        return encoder

    def time_passes(self, mark: Mark) -> None:
        for unit in self._units:
            _time_unit(unit, mark)

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        # Gradients are summed as shards, within a group in every micro-batch and over the groups in the last one.
        assert isinstance(self._encoder, FSDPModule)
        self._encoder.set_requires_all_reduce(last)
        self._encoder.set_is_last_backward(last)
        yield

    def end_step(self) -> None:
        # A pass without a backward pass leaves weights behind that are not freed otherwise.
        assert self._encoder is not None
        for module in self._encoder.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def trained_parameters(self, values: Mapping[nn.Parameter, float]) -> dict[nn.Parameter, float]:
        counterparts = {shard.whole: shard.parameter for shard in self._shards}
        return {counterparts.get(parameter, parameter): value for parameter, value in values.items()}

    def scaler(self, enabled: bool) -> torch.amp.GradScaler:
        return ShardedScaler(self.world, enabled)

    def gradient_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        whole = nn.utils.get_total_norm([gradient for gradient in gradients if not isinstance(gradient, DTensor)])
        shards = nn.utils.get_total_norm(
            [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
        )
        groups = self.world.size // self._ranks
        of_encoder = self.world.sum(shards.to(self.world.device).square()) / groups
        return (of_encoder + whole.to(self.world.device).square()).sqrt()

    def clip_gradient_(self, parameters: Sequence[nn.Parameter], largest: float, norm: Tensor) -> None:
        for group in by_kind(parameters):
            nn.utils.clip_grads_with_norm_(group, largest, norm)

    @contextmanager
    def stepping(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Split the parameter groups for the step: torch updates no shards together with whole tensors."""
        groups = optimizer.param_groups
        parts = [
            (group, {**group, "params": parameters}) for group in groups for parameters in by_kind(group["params"])
        ]
        optimizer.param_groups = [part for _, part in parts]
        try:
            yield
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            if isinstance(error, torch.OutOfMemoryError) or not _is_raised_by_shards(error):
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
        for shard in self._shards:
            shard.parameter.copy_(_distributed(shard.whole.detach(), shard.parameter))

    def whole_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self._whole_value(value) for key, value in state.items()}

    def finish(self) -> None:
        self._is_whole = True
        for shard in self._shards:
            shard.fill(self.world.device)

    def _free(self) -> None:
        self._is_whole = False
        for shard in self._shards:
            shard.whole.data = torch.empty(0, dtype=shard.whole.dtype, device=self.world.device)

    def _shard(self, unit: nn.Module) -> None:
        parameters = [parameter for parameter in unit.parameters() if not isinstance(parameter, DTensor)]
        for parameter in parameters:
            parameter.data = parameter.data.to(self.world.device).contiguous()
        self.world.broadcast_(parameter.detach() for parameter in parameters)
        if self._offload:
            for parameter in parameters:
                parameter.data = parameter.data.cpu()
        on_gpu = self.world.device.type == "cuda"
        fully_shard(
            unit,
            mesh=self._mesh,
            reshard_after_forward=self._reshard,
            shard_placement_fn=self._placement,
            mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
            offload_policy=CPUOffloadPolicy(pin_memory=on_gpu) if self._offload else OffloadPolicy(),
        )
        unit.register_forward_hook(_free_casts)

    def _placement(self, parameter: nn.Parameter) -> Shard:
        """Shard the first dimension that the ranks divide evenly, so that every rank holds as much as the others."""
        even = [place for place, size in enumerate(parameter.shape) if size % self._ranks == 0]
        return Shard(even[0] if even else 0)

    def _whole_value(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self._whole_value(item) for key, item in value.items()}
        if isinstance(value, DTensor):
            whole = _gathered(value, self.world.device)
            return whole.cpu() if self.world.is_first else None
        return value


class _Shard:
    """A parameter of `trained` and its counterpart in `model`. stride: of the whole parameter."""

    def __init__(self, whole: nn.Parameter, parameter: nn.Parameter, stride: tuple[int, ...]) -> None:
        self.whole, self.parameter, self._stride = whole, parameter, stride

    def fill(self, device: torch.device) -> None:
        """Give the whole parameter its values. Collective."""
        values = _gathered(self.parameter.detach(), device)
        self.whole.data = torch.empty_strided(values.shape, self._stride, dtype=values.dtype, device=device)
        self.whole.data.copy_(values)


def _time_unit(unit: nn.Module, mark: Mark) -> None:
    """Mark the waits for the weights of a unit: its FSDP hooks lie between the two forward pre-hooks here.

    In the backward pass they lie between the gradient of a unit's input and that of the output of the unit before.
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

    unit.register_forward_pre_hook(before_wait, prepend=True)
    unit.register_forward_pre_hook(after_wait)
    unit.register_forward_hook(after_pass)


@torch.compiler.disable
def _free_casts(module: nn.Module, arguments: object, output: object) -> None:
    """Free the casts of weights that autocast keeps for a second use: a unit is used once in a pass."""
    torch.clear_autocast_cache()


def _is_raised_by_shards(error: BaseException) -> bool:
    """Return True if an operation on DTensors has raised the error."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    return "DTensor" in str(error) or any("torch/distributed/tensor/" in file for file in files)


def _mesh(world: World, ranks: int) -> DeviceMesh:
    """Return the groups of ranks: those that divide the weights, and across them those that hold the same shard."""
    kind = world.device.type
    if ranks == world.size:
        return init_device_mesh(kind, (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (world.size // ranks, ranks), mesh_dim_names=("replicate", "shard"))


def _units(encoder: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks to gather by themselves: those with matrices, which share no parameter with other modules."""
    users: dict[nn.Parameter, set[nn.Module]] = {}
    for module in encoder.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, set()).add(module)

    def is_unit(block: nn.Module) -> bool:
        modules, parameters = set(block.modules()), list(block.parameters())
        return any(parameter.ndim > 1 for parameter in parameters) and all(users[p] <= modules for p in parameters)

    return [block for block in blocks if is_unit(block)]


def _gathered(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the whole tensor on a device. Collective."""
    on_device: Any = tensor.to(device)
    return on_device.full_tensor()


def _distributed(value: Any, like: Tensor) -> Any:
    """Return this rank's shard of a whole tensor, placed as `like` is; other values as they are."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    local = like.to_local()
    shard = distribute_tensor(value.to(local.device), like.device_mesh, like.placements, src_data_rank=None)
    return shard.to(local.dtype)
