"""Which part of the state every rank writes to a sharded checkpoint, and which it reads from any checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from clipzoo.distributed.world import World
from clipzoo.encoders.tuning import plain_name
from clipzoo.errors import ConfigError
from clipzoo.objectives.base import Objective
from clipzoo.training.checkpoints.manifest import encoded, name_of
from clipzoo.training.checkpoints.pieces import Keys, Piece, Place, is_sharded, like, local, mapped, tensors
from clipzoo.training.settings import CheckpointFormat


class Sharding:
    """Parts of the state by rank.

    DTensors are sharded as they are in the memory of the ranks, and so is the per-sample state of an objective that
    shares it. All other tensors are whole on every rank. Buffers of modules are written by the first rank, because the
    running statistics of a batch norm differ between ranks; one rank writes each of the others.

    modules: by name. parts: all parts of the state by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module], parts: Mapping[str, Any], world: World) -> None:
        self.modules, self._parts, self._world = modules, parts, world
        self._buffers: set[Keys] = {
            (part, plain_name(name)) for part, module in modules.items() for name, _ in module.named_buffers()
        }
        self._places: dict[Keys, Place] = {
            (part, name): place
            for part, module in modules.items()
            if isinstance(module, Objective)
            for name, place in ((name, Place(*box)) for name, box in module.shares().items())
        }
        self._group: ProcessGroup | None = None

    def applies(self, format: CheckpointFormat) -> bool:
        """Return True if checkpoints have one file for each rank. Raises ConfigError if they must, and may not."""
        if format == "file" and self._places:
            raise ConfigError(
                "trainer.checkpoint_format=file needs the whole state on the first rank: give "
                "trainer.checkpoint_format=auto"
            )
        parameters = (parameter for module in self.modules.values() for parameter in module.parameters())
        return format == "sharded" or (format == "auto" and (bool(self._places) or any(map(is_sharded, parameters))))

    def writing(
        self,
        path: Path,
        state: Mapping[str, Any],
        facts: Mapping[str, Any],
        keep: int,
        copy: bool,
        written: Callable[[], None] = lambda: None,
    ) -> Callable[[], None]:
        """Return a function that writes this rank's part of the state. Collective, and so is that function.

        copy: write a copy of the state, which training may change before it is written. written: called when this rank
        has written its part.
        """
        from clipzoo.training.checkpoints.sharded_writer import save_sharded

        if self._group is None:
            self._group = self._world.background_group()
        pieces: dict[str, Piece] = {}
        for keys, tensor in tensors(state):
            place = self._places.get(keys) or Place.of(tensor)
            # The last two keys, because averaged weights are stored by module too.
            if self._world.is_first or keys[-2:] not in self._buffers or keys in self._places:
                pieces[name_of(keys)] = Piece(local(tensor).detach().to("cpu", copy=copy), place)
        return partial(save_sharded, path, pieces, encoded(state), facts, keep, self._world.rank, self._group, written)

    def templates(self) -> Templates:
        """Return the tensors that a checkpoint is to fill."""
        parameters: dict[Keys, list[Tensor]] = {}
        templates: dict[Keys, Tensor] = {}
        for name, part in self._parts.items():
            templates |= {(name, *keys): tensor for keys, tensor in tensors(part.state_dict())}
            if hasattr(part, "param_groups"):
                parameters[name,] = [one for group in part.param_groups for one in group["params"]]
        return Templates(templates, parameters, self._places)


class Templates:
    """The tensors that a checkpoint is to fill.

    tensors: by their keys in the state. parameters: of optimizers, by the optimizer's key: state that they do not have
    yet is sharded like its parameter. places: of tensors that are a rank's part without being DTensors.
    """

    def __init__(
        self, tensors: Mapping[Keys, Tensor], parameters: Mapping[Keys, list[Tensor]], places: Mapping[Keys, Place]
    ) -> None:
        self._tensors, self._parameters, self._places = tensors, parameters, places
        self._sharded: dict[Keys, Tensor] = {}

    def place(self, keys: Keys, shape: tuple[int, ...]) -> Place:
        """Return the part of a stored tensor that this rank needs: `Layout` of a reader."""
        if keys in self._places and self._places[keys].whole == shape:
            return self._places[keys]
        template = self._template(keys)
        if template is None or template.shape != shape:
            return Place.everything(shape)
        if is_sharded(template):
            self._sharded[keys] = template
        return Place.of(template)

    def restored(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state that was read with DTensors where the templates are DTensors."""

        def restore(keys: Keys, part: Tensor) -> Tensor:
            return like(part, self._sharded[keys]) if keys in self._sharded else part

        changed: dict[str, Any] = mapped(state, restore)
        return changed

    def _template(self, keys: Keys) -> Tensor | None:
        """Return the tensor of the same keys, or the parameter that the state of an optimizer belongs to."""
        parameters = self._parameters.get(keys[:1], [])
        if len(keys) == 4 and keys[1] == "state" and isinstance(keys[2], int) and keys[2] < len(parameters):
            return parameters[keys[2]]
        return self._tensors.get(keys)
