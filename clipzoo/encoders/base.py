"""Base classes of encoders and towers, and encoding of captions in groups of similar length."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.checkpoint import checkpoint

from clipzoo.errors import ConfigError
from clipzoo.io import DamagedFileError
from clipzoo.types import Features, evaluation_mode

COMPUTED_BYTES = 2**27
"""Size of the buffers that a model of any size may compute."""
QUANTUM = 4
"""Rows and width of a group of captions are multiples of this number, except in the longest group, so that
torch.compile sees few shapes."""
CPU_OVERHEAD, GPU_OVERHEAD = 128, 8192
"""Tokens whose encoding takes as long as starting one more group: kernel launches dominate on a GPU."""


def no_tokenizer(captions: list[str]) -> Tensor:
    raise ConfigError("this encoder has been built without a tokenizer: give tokenizer=...")


class Encoder(nn.Module):
    """Base class of encoders, which map each view to Features; projections belong to the head."""

    image_width: int
    text_width: int
    tokenizer: Callable[[list[str]], Tensor] = staticmethod(no_tokenizer)
    image_size: int
    context_length: int | None = None
    """Maximum number of tokens of a caption; None for any number."""
    needs_padding: bool = False
    """True if text features depend on the padding: captions are then not trimmed to the longest of the batch."""

    @abstractmethod
    def image(self, image: Tensor) -> Features:
        """[b, 3, H, W] -> Features of width `image_width`. Datasets of images give uint8; the encoder normalises."""

    @abstractmethod
    def text(self, text: Tensor) -> Features:
        """[b, L] token ids -> Features of width `text_width`; L may be any length up to the context."""

    def pooled_image(self, image: Tensor) -> Tensor:
        """Return only the pooled features, [b, w]; encoders whose tokens cost more override this."""
        return self.image(image).pooled

    def pooled_text(self, text: Tensor) -> Tensor:
        """Return only the pooled features, [b, w]; encoders whose tokens cost more override this."""
        return self.text(text).pooled

    @property
    def towers(self) -> dict[str, nn.Module]:
        """The modules `image_tower` and `text_tower` by view, for encoders that have them; they share no parameters."""
        return {view: tower for view in ("image", "text") if (tower := self._modules.get(f"{view}_tower")) is not None}

    def facts(self) -> Mapping[str, Any]:
        """Return plain values by name, to which `from_model:NAME` in a configuration refers."""
        return {}

    def without_tokens(self) -> list[str]:
        """Return the names of the towers that give no tokens, for messages."""
        return []


class Tower(nn.Module):
    """Base class of towers. The trunk is the library's own module; no projection follows it.

    width: width of the pooled features. Tokens have the same width.
    description: the tower in a message, such as "timm's resnet50".
    left_out: parts of names of tensors that only pretrained models have, such as those of a decoder.
    embed_width: width of the projection after the tower in its pretrained model; None for a tower without one.
    names_elsewhere: prefix of our names -> prefix in pretrained models, beyond a prefix that all names share.
    """

    width: int
    description: str = ""
    embed_width: int | None = None
    names_elsewhere: Mapping[str, str] = {}
    left_out: tuple[str, ...] = ()

    def pooled(self, inputs: Tensor) -> Tensor:
        """Return only the pooled features, [b, w]; towers whose tokens cost more override this."""
        return self(inputs).pooled

    def gives_tokens(self) -> bool:
        """Return True if the features have tokens."""
        return True

    def layers(self) -> list[nn.Module]:
        """Return the blocks of the trunk, from the input to the output; the default is `longest_list`.

        Embeddings come before the first block; norms and pooling after the last block belong to it.
        """
        return longest_list(self)


class ImageTower(Tower):
    """Base class of image towers: float images [b, 3, H, W] -> Features.

    input_size: H and W of the images. mean, std: normalisation of [0, 1] images that the model is made for.
    interpolation, resize_mode: resizing of images in evaluations, see `clipzoo.evaluation.encoder.Transform`.
    """

    input_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str = "bicubic"
    resize_mode: str = "shortest"

    @torch.no_grad()
    def gives_tokens(self) -> bool:
        """Run the tower on one black image."""
        parameter = next(self.parameters())
        image = torch.zeros(1, 3, self.input_size, self.input_size, dtype=parameter.dtype, device=parameter.device)
        with evaluation_mode(self):
            return self(image).tokens is not None


class TextTower(Tower):
    """Base class of text towers: token ids [b, L] -> Features.

    context_length: largest L. end_token: id of the first token after which all are padding, None if the tower needs
    none. needs_padding: True if features depend on padding. tokenizer: node of its tokenizer in a configuration.
    """

    context_length: int
    end_token: int | None = None
    needs_padding: bool = False
    tokenizer: Mapping[str, Any]

    def find_end_token(self, tokenizer: Any) -> int | None:
        """Return `end_token` for a given tokenizer; None for the tower's own."""
        return self.end_token


def longest_list(tower: nn.Module, kinds: Any = nn.ModuleList | nn.Sequential) -> list[nn.Module]:
    """Return the longest list of modules of one class in a tower, mostly its blocks. kinds: classes of lists."""
    lists = ([*module] for module in tower.modules() if isinstance(module, kinds))
    return max((modules for modules in lists if len({*map(type, modules)}) == 1), key=len, default=[])


def recompute_blocks(blocks: Sequence[nn.Module], every: int) -> None:
    """Let every `every`-th block recompute its activations in the backward pass instead of keeping them; 0: none."""
    for block in blocks[every - 1 :: every] if every else ():
        block.forward = MethodType(_recomputed, block)


def _recomputed(block: Any, *inputs: Any, **options: Any) -> Any:
    forward = partial(type(block).forward, block)
    run = partial(checkpoint, forward, use_reentrant=False) if block.training else forward
    return run(*inputs, **options)


def call_as_forward(block: nn.Module, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return `function(block, *inputs)` in place of the block's forward pass, recomputed if `recompute_blocks` says so.

    Hooks of the block, which may gather weights, are called.
    """
    if "forward" in vars(block) and block.training:
        return checkpoint(_call_with_hooks, block, function, *inputs, use_reentrant=False)
    return _call_with_hooks(block, function, *inputs)


def _call_with_hooks(block: nn.Module, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    if not (block._forward_pre_hooks or block._forward_hooks):
        return function(block, *inputs)
    before = {name: value for name, value in vars(block).items() if name == "forward"}
    block.forward = partial(function, block)
    try:
        return block(*inputs)
    finally:
        del block.forward
        vars(block).update(before)


@contextmanager
def on_meta(stored: int) -> Iterator[None]:
    """Build modules on the meta device; ConfigError for many more parameters than there are `stored` tensors."""
    most, registered = 4 * stored + 1000, count()

    def counted(*parameter: object) -> None:
        if next(registered) >= most:
            raise ConfigError(f"the configuration has layers for over {most} tensors, the weights have {stored}")

    hook = register_module_parameter_registration_hook(counted)
    try:
        with torch.device("meta"):
            yield
    finally:
        hook.remove()


def require_as_large(model: nn.Module, stored: Iterable[Tensor], path: Path, remedy: str = "") -> None:
    """Raise DamagedFileError if a model on the meta device, with its buffers, is much larger than its weights."""
    needed_bytes = sum(value.nbytes for values in (model.parameters(), model.buffers()) for value in values)
    stored_bytes = sum(value.nbytes for value in stored)
    if needed_bytes > 4 * stored_bytes + COMPUTED_BYTES:
        fault = f"has {stored_bytes:,} bytes of weights, the model of its configuration needs {needed_bytes:,} bytes"
        raise DamagedFileError(path, fault, remedy)


def encode_by_length(
    encode: Callable[[Tensor], Features], text: Tensor, lengths: Tensor | None, tokens: bool
) -> Features:
    """Token ids [b, L] -> features in the order of the batch, encoded in groups of similar length.

    Equal to `encode(text)` up to rounding for towers whose features do not depend on padding. The tokens of padding
    are zeros where their group has fewer than L positions, and False in the mask.

    lengths: [b] on the CPU, tokens of each caption up to its end token; None for one group, such as a batch whose
        padding matters. tokens: return tokens and mask too, if the tower has them.
    """
    groups = caption_groups(text, lengths)
    if lengths is None or len(groups) == 1:
        return encode(text)
    order = lengths.argsort(stable=True)
    sorted_text = text[order.to(text.device, non_blocking=True)]
    rows, widths = zip(*groups, strict=True)
    parts = [encode(part[:, :width].contiguous()) for part, width in zip(sorted_text.split(rows), widths, strict=True)]
    inverse = order.argsort().to(text.device, non_blocking=True)
    pooled = torch.cat([part.pooled for part in parts]).index_select(0, inverse)
    if not tokens or parts[0].tokens is None:
        return Features(pooled)
    padded, masks = [], []
    for part in parts:
        assert part.tokens is not None
        mask = torch.ones_like(part.tokens[..., 0], dtype=torch.bool) if part.mask is None else part.mask
        missing = text.shape[1] - part.tokens.shape[1]
        padded.append(functional.pad(part.tokens, (0, 0, 0, missing)))
        masks.append(functional.pad(mask, (0, missing)))
    all_tokens, all_masks = (torch.cat(tensors).index_select(0, inverse) for tensors in (padded, masks))
    return Features(pooled, all_tokens, all_masks)


def caption_groups(text: Tensor, lengths: Tensor | None) -> list[tuple[int, int]]:
    """Return rows and width of the groups of `encode_by_length`; without lengths, of the whole batch of any view."""
    if lengths is None:
        return [(len(text), text.shape[-1])]
    overhead = CPU_OVERHEAD if text.device.type == "cpu" else GPU_OVERHEAD
    return group_shapes(sorted(lengths.tolist()), text.shape[1], overhead)


def group_shapes(lengths: Sequence[int], limit: int, overhead: int) -> list[tuple[int, int]]:
    """Return rows and width of the groups of captions, given their lengths in ascending order.

    The sum over the groups of rows times width plus `overhead` is the smallest possible. limit: largest width.
    """
    best: dict[int, tuple[int, list[tuple[int, int]]]] = {0: (0, [])}
    for width in (*range(QUANTUM, limit, QUANTUM), limit):
        # The first `end` captions have at most `width` tokens; rows beyond a multiple of QUANTUM join the next.
        end = bisect_right(lengths, width)
        end = end if end == len(lengths) else end // QUANTUM * QUANTUM
        if end not in best:
            costs = ((cost + (end - start) * width + overhead, start) for start, (cost, _) in best.items())
            cost, start = min(costs)
            best[end] = cost, [*best[start][1], (end - start, width)]
    return best[len(lengths)][1]
