"""The last block of a transformer at the position that is pooled: the other positions are only its keys and values.

For heads that read no tokens. Blocks are open_clip's and timm's own, with their parameters and submodules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from clipzoo.encoders.base import call_as_forward


def open_clip_block_at(block: Any, states: Tensor, state: Tensor, visible: Tensor | None) -> Tensor:
    """Return open_clip's residual attention block at one position of each row, [b, w].

    states: [b, L, w]. state: [b, w], that position of `states`. visible: [b, L], the positions that it attends to;
    None for all.
    """
    attention, width = block.attn, states.shape[-1]
    weight, bias = attention.in_proj_weight, attention.in_proj_bias
    query = functional.linear(block.ln_1(state), weight[:width], bias[:width]).unflatten(-1, (attention.num_heads, -1))
    projected = functional.linear(block.ln_1(states), weight[width:], bias[width:])
    key, value = projected.unflatten(-1, (2, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    mask = None if visible is None else visible[:, None, None, :]
    # [b, heads, 1, w / heads]
    attended = functional.scaled_dot_product_attention(query.unsqueeze(2), key, value, mask)
    state = state + block.ls_1(attention.out_proj(attended.flatten(1)))
    return state + block.ls_2(block.mlp(block.ln_2(state)))


def _open_clip_block_at_first(block: Any, states: Tensor) -> Tensor:
    return open_clip_block_at(block, states, states[:, 0], None)


def _timm_block_at_first(block: Any, states: Tensor) -> Tensor:
    """Return timm's block at the first position, [b, 1, w]. states: [b, L, w]."""
    attention, state = block.attn, states[:, :1]
    weight, bias, width = attention.qkv.weight, attention.qkv.bias, attention.num_heads * attention.head_dim
    own, other = (None, None) if bias is None else (bias[:width], bias[width:])
    query = functional.linear(block.norm1(state), weight[:width], own)
    projected = functional.linear(block.norm1(states), weight[width:], other)
    key, value = projected.unflatten(-1, (2, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    query = query.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
    query, key = attention.q_norm(query), attention.k_norm(key)
    attended = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    attended = attention.proj_drop(attention.proj(attention.norm(attended)))
    state = state + block.drop_path1(block.ls1(attended))
    return state + block.drop_path2(block.ls2(block.mlp(block.norm2(state))))


def at_one_position(recompute: bool, block: nn.Module, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return `function(block, *inputs)`; recompute: its activations in the backward pass instead of keeping them."""
    if recompute:
        return checkpoint(call_as_forward, block, function, *inputs, use_reentrant=False)
    return call_as_forward(block, function, *inputs)


def open_clip_vit_at_first(trunk: Any, image: Tensor) -> Tensor:
    """[b, 3, H, W] -> [b, w], the first position after the last block of open_clip's vision transformer."""
    recompute = trunk.transformer.grad_checkpointing
    *blocks, last = trunk.transformer.resblocks
    states = trunk._embeds(image)
    for block in blocks:
        states = checkpoint(block, states, use_reentrant=False) if recompute else block(states)
    return at_one_position(recompute, last, _open_clip_block_at_first, states)


def pools_first_of_open_clip(trunk: Any) -> bool:
    """Return True if `open_clip_vit_at_first` can take the place of this vision transformer of open_clip."""
    from open_clip.transformer import ResidualAttentionBlock

    blocks = trunk.transformer.resblocks
    return trunk.attn_pool is None and trunk.pool_type == "tok" and type(blocks[-1]) is ResidualAttentionBlock


def timm_vit_at_first(trunk: Any, image: Tensor) -> Tensor:
    """[b, 3, H, W] -> [b, 1, w], the first position after the last block of timm's vision transformer and its norm."""
    *blocks, last = trunk.blocks
    states = trunk.norm_pre(trunk.patch_drop(trunk._pos_embed(trunk.patch_embed(image))))
    for block in blocks:
        states = checkpoint(block, states, use_reentrant=False) if trunk.grad_checkpointing else block(states)
    return trunk.norm(at_one_position(trunk.grad_checkpointing, last, _timm_block_at_first, states))


def pools_first_of_timm(trunk: Any) -> bool:
    """Return True if `timm_vit_at_first` can take the place of `forward_features` of this trunk of timm."""
    from timm.models.vision_transformer import Attention, Block, VisionTransformer

    if type(trunk) is not VisionTransformer or trunk.global_pool != "token" or trunk.attn_pool is not None:
        return False
    block = trunk.blocks[-1]
    if type(block) is not Block or type(block.attn) is not Attention:
        return False
    # Dropout would draw other numbers than timm's own forward pass.
    return getattr(block.attn, "gate", None) is None and not any(
        isinstance(module, nn.Dropout) and module.p > 0 for module in block.modules()
    )
