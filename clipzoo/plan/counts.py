"""Counts of a configuration, without weights or a device: parameters, FLOPs, activations, state."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from clipzoo.build import build_model, build_part, build_parts, parameters_of
from clipzoo.config.trust import values_of
from clipzoo.heads.base import Head
from clipzoo.objectives.base import Objective
from clipzoo.training.gradients import PairEncoder
from clipzoo.training.tuned import TunedModel
from clipzoo.types import Batch, Views

# Memory of tensors, counted as they are made and freed; fake tensors use none and are counted as if they did.


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of tensors made in the block: `live` now, `peak` at most. known: uncounted tensors."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in known)
        self._sizes: weakref.WeakKeyDictionary[torch.UntypedStorage, list[int]] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage not in self._known and storage not in self._sizes:
                size = self._sizes[storage] = [0]
                weakref.finalize(storage, self._change, size, 0)
                self._change(size, storage.nbytes())
        return result

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage at its new size, which no dispatch mode sees."""
        if storage in self._sizes:
            self._change(self._sizes[storage], storage.nbytes())

    def _change(self, size: list[int], now: int) -> None:
        self.live += now - size[0]
        self.peak = max(self.peak, self.live)
        size[0] = now


def replace_tensors_(module: nn.Module) -> None:
    """Replace all tensors of a module, in place, by new ones. Call it under FakeTensorMode."""
    replaced: dict[int, nn.Parameter] = {}
    for part in module.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for tensors in tables:
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                new = torch.empty(tensor.shape, dtype=tensor.dtype)
                if isinstance(tensor, nn.Parameter):
                    new = replaced.setdefault(id(tensor), nn.Parameter(new, tensor.requires_grad))
                tensors[name] = new


SAMPLES = 2, 4
"""Batches of which the encoders' activations are counted: the memory is linear in the number of samples."""


@dataclass(frozen=True)
class Activations:
    """Bytes that the encoders keep for the backward pass: `fixed` and `per_sample`, of which `per_image`.

    fixed: copies of the weights in the precision of the encoders, of which `fixed_images` of the image tower.
    """

    fixed: float
    per_sample: float
    per_image: float
    fixed_images: float

    def of(self, samples: int) -> float:
        return self.fixed + self.per_sample * samples

    def of_images(self, samples: int) -> float:
        return self.fixed_images + self.per_image * samples


@dataclass(frozen=True)
class Blocks:
    """Parameters of the blocks of a tower: of the largest one and of all."""

    largest: int
    total: int


@dataclass(frozen=True)
class Counts:
    """Sizes and operations of a step of one configuration, independent of the ranks.

    encoder, others: parameters of the encoder, and of head and objective; trained_encoder, trained_others: those that
    train. outside: parameters of the encoder outside of its blocks. image_blocks, text_blocks: of the towers; both of
    the whole encoder if it has no towers. largest_of_text: parameters of the largest tensor of the text tower that
    trains. optimizer: bytes of its state for a trained parameter.
    state: bytes of the per-sample state. buffers: bytes of other buffers. forward_flops: of the encoders for a pair;
    step_flops: with the backward pass. sample: bytes of an image and its caption. activations: without and with
    recomputation. head, objective: on the meta device, for their costs.
    """

    head: Head
    objective: Objective
    encoder: int
    others: int
    trained_encoder: int
    trained_others: int
    outside: int
    image_blocks: Blocks
    text_blocks: Blocks
    largest_of_text: int
    optimizer: float
    state: int
    buffers: int
    forward_flops: float
    step_flops: float
    sample: int
    activations: Mapping[bool, Activations]
    image_points: int
    text_points: int


def count(plain: Mapping[str, Any], samples: int, trust: Collection[str] = ()) -> Counts:
    """Count a checked configuration. samples: of the dataset."""
    with torch.device("meta"):
        parts = build_parts(plain, trust)
        objective = parts.objective
        others_before = _buffer_bytes(objective)
        objective.allocate(samples)
        model = build_model(plain, parts.head, trust)
        TunedModel(model, objective, parts.tuning, plain["seed"])
        # FLOPs of a forward pass of a sample's images and of its texts, and their numbers of tokens.
        flops, points = [], []
        # The text towers of transformers read the values of masks, unless these are fake tensors.
        with FakeTensorMode(allow_non_fake_inputs=True):
            batch = batch_of(plain, 1, "meta")
            for encode, view in ((model.image_read_by_head, batch.images), (model.text_read_by_head, batch.texts)):
                with FlopCounterMode(display=False) as counter:
                    features = encode(view)
                flops.append(float(counter.get_total_flops()))
                points.append(1 if features.tokens is None else features.tokens.shape[1])

    # Bytes of state that the optimizer keeps for a parameter, counted on a small matrix.
    layer = nn.Linear(64, 64, bias=False)
    optimizer = parts.optimizer.build(layer)
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    of_optimizer = sum(value.nbytes for value in values if value.ndim) / layer.weight.numel()

    autocast, encoder = parts.settings.autocast_dtype, model.encoder
    image_tower, text_tower = (encoder.towers.get(view, encoder) for view in ("image", "text"))
    passes = [3 if _trained(tower) else 1 for tower in (image_tower, text_tower)]
    blocks = PairEncoder(model, autocast, compile=False).blocks()
    return Counts(
        head=model.head,
        objective=objective,
        encoder=parameters_of(encoder),
        others=parameters_of(model.head) + parameters_of(objective),
        trained_encoder=_trained(encoder),
        trained_others=_trained(model.head) + _trained(objective),
        outside=parameters_of(encoder) - _blocks(encoder, blocks).total,
        image_blocks=_blocks(image_tower, blocks),
        text_blocks=_blocks(text_tower, blocks),
        largest_of_text=max((p.numel() for p in text_tower.parameters() if p.requires_grad), default=0),
        optimizer=of_optimizer,
        state=_buffer_bytes(objective) - others_before,
        buffers=_buffer_bytes(encoder) + _buffer_bytes(model.head) + others_before,
        forward_flops=sum(flops),
        step_flops=sum(count * number for count, number in zip(flops, passes, strict=True)),
        sample=batch.image.nbytes + batch.text.nbytes,
        activations={on: _activations(plain, on, autocast, trust) for on in (False, True)},
        image_points=points[0],
        text_points=points[1],
    )


def recomputation(plain: Mapping[str, Any]) -> dict[str, bool]:
    """Return the keys of the configuration that switch activation checkpointing of towers, with their values."""
    return {key: bool(value) for key, value in values_of(plain["encoder"], "encoder") if key.endswith(".checkpoint")}


def batch_of(plain: Mapping[str, Any], samples: int, device: str = "cpu") -> Batch:
    """Return a batch of the shape that the configuration's loader gives, with values that nothing reads."""
    size, tokens = plain["encoder"]["image_size"], plain["encoder"]["context_length"]
    node = plain["data"].get("views")
    views = build_part(node, kind=Views) if node else Views()
    images, texts = (([count] if count > 1 else []) for count in (views.images, views.texts))
    return Batch(
        torch.zeros(samples, *images, 3, size, size, dtype=torch.uint8, device=device),
        torch.zeros(samples, *texts, tokens, dtype=torch.int64, device=device),
        torch.arange(samples, dtype=torch.int64, device=device),
        views=views,
    )


def _activations(
    plain: Mapping[str, Any], recomputed: bool, autocast: torch.dtype | None, trust: Collection[str]
) -> Activations:
    """Count the activations kept for two batch sizes, and fit a line through both.

    recomputed: with activation checkpointing, of all towers unless it is on for some; otherwise without it.
    """
    changed, switches = copy.deepcopy(dict(plain)), recomputation(plain)
    if not (recomputed and any(switches.values())):
        for key in switches:
            *path, name = key.split(".")
            reduce(getitem, path, changed)[name] = recomputed
    with torch.device("meta"):
        parts = build_parts(changed, trust)
        model = build_model(changed, parts.head, trust)
        TunedModel(model, parts.objective, parts.tuning, plain["seed"])
    images, kept = [], []
    with FakeTensorMode():
        replace_tensors_(model)
        model.train()
        encoder = PairEncoder(model, autocast, compile=False)
        for samples in SAMPLES:
            batch = batch_of(plain, samples)
            with LiveMemory([*model.parameters(), *model.buffers(), batch.image, batch.text]) as memory:
                features = encoder(batch, ["image"])
                images.append(memory.live)
                features += encoder(batch, ["text"])
                kept.append(memory.live)
                del features
    slope, of_images = ((two[1] - two[0]) / (SAMPLES[1] - SAMPLES[0]) for two in (kept, images))
    return Activations(kept[0] - SAMPLES[0] * slope, slope, of_images, images[0] - SAMPLES[0] * of_images)


def _blocks(tower: nn.Module, all_blocks: list[nn.Module]) -> Blocks:
    modules = set(tower.modules())
    sizes = [parameters_of(block) for block in all_blocks if block in modules]
    return Blocks(max(sizes, default=0), sum(sizes))


def _trained(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _buffer_bytes(module: nn.Module) -> int:
    return sum(buffer.nbytes for buffer in module.buffers())
