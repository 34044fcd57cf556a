"""CLIP's text transformer, without its projection."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from clipzoo.encoders.base import Tower, call_as_forward, recompute_blocks
from clipzoo.encoders.image import open_clip_block_at
from clipzoo.io.weights import import_alone
from clipzoo.types import Count, Features, Layers, NonNegativeCount, Range, checked


@checked
class ClipTextTower(Tower):
    """Token ids [b, L] -> Features: causal transformer, pooled at the end-of-text token, tokens after the final norm.

    Blocks, parameter names and initialisation are open_clip's. The forward pass is clipzoo's: with a causal flag
    instead of a mask tensor the attention kernel skips half of the work, and L may be shorter than the context, because
    in a causal tower no position depends on later ones.

    context_length: maximum number of tokens L. vocabulary: number of token ids. width: width of the tokens.
    layers: number of transformer blocks. heads: number of attention heads.
    end_token: id of the end token; all positions after its first occurrence are padding.
    distinct_pads: the k-th position after the end token has its own embedding, row vocabulary - 1 + k (for WPSE and
    KME-CLIP, where padding tokens are points). norm_eps: epsilon of the layer norms.
    checkpoint: recompute activations in the backward pass; a number: of every k-th block only.
    """

    relations = {
        "width % heads == 0": "width must be a multiple of heads",
        "end_token < vocabulary": "end_token must be an id of the vocabulary",
    }

    def __init__(
        self,
        context_length: Count,
        vocabulary: Count,
        width: Count,
        layers: Layers,
        heads: Count,
        quick_gelu: bool,
        distinct_pads: bool,
        end_token: NonNegativeCount,
        norm_eps: Annotated[float, Range(at_least=1e-30, at_most=1)],
        checkpoint: bool | Count = False,
    ) -> None:
        super().__init__()
        transformer = import_alone("open_clip.transformer")
        self.width, self.context_length, self.end_token = width, context_length, end_token
        self.first_pad = vocabulary if distinct_pads else None
        self.trunk = transformer.TextTransformer(
            context_length=context_length,
            vocab_size=vocabulary + (context_length - 1 if distinct_pads else 0),
            width=width,
            layers=layers,
            heads=heads,
            act_layer=transformer.QuickGELU if quick_gelu else nn.GELU,
            norm_layer=lambda normalized: nn.LayerNorm(normalized, eps=norm_eps),
            proj_type="none",
            pool_type="none",
        )
        # The causal flag replaces open_clip's mask tensor.
        self.trunk.attn_mask = None
        recompute_blocks(self.layers(), checkpoint)

    def forward(self, text: Tensor) -> Features:
        ids, offset = self._with_pads(text)
        tokens = self.trunk.ln_final(causal_states(self.trunk, ids))
        return Features(_at(tokens, offset == 0), tokens, offset <= 0)

    def pooled(self, text: Tensor) -> Tensor:
        ids, offset = self._with_pads(text)
        return self.trunk.ln_final(causal_states(self.trunk, ids, offset))

    def layers(self) -> list[nn.Module]:
        return list(self.trunk.transformer.resblocks)

    def _with_pads(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids with the pads of the tower, and the offset of each position from the end token, [b, L]."""
        offset = torch.arange(text.shape[1], device=text.device) - end_positions(text, self.end_token)[:, None]
        pads = torch.zeros_like(text) if self.first_pad is None else self.first_pad - 1 + offset
        return torch.where(offset <= 0, text, pads), offset


def end_positions(text: Tensor, end_token: int) -> Tensor:
    """[b, L] -> [b], the position of the first end token of each caption; the last position if there is none."""
    is_end = text == end_token
    return torch.where(is_end.any(dim=1), is_end.int().argmax(dim=1), text.shape[1] - 1)


def causal_states(trunk: Any, text: Tensor, offset: Tensor | None = None) -> Tensor:
    """Ids [b, L] -> [b, L, w] after the last block of open_clip's causal text transformer.

    offset: [b, L], increasing by 1; return only the states where it is 0, [b, w], so that the last block computes
    queries, attention and perceptron only there.
    """
    states = trunk.token_embedding(text) + trunk.positional_embedding[: text.shape[1]]
    *blocks, last = trunk.transformer.resblocks
    for block in blocks:
        states = call_as_forward(block, _causal_block, states)
    if offset is None:
        return call_as_forward(last, _causal_block, states)
    return call_as_forward(last, open_clip_block_at, states, _at(states, offset == 0), offset <= 0)


def _causal_block(block: Any, states: Tensor) -> Tensor:
    """open_clip's residual attention block with a causal flag in place of a mask. [b, L, w] -> [b, L, w]."""
    attention = block.attn
    projected = functional.linear(block.ln_1(states), attention.in_proj_weight, attention.in_proj_bias)
    query, key, value = projected.unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    states = states + attention.out_proj(attended.transpose(1, 2).flatten(2))
    return states + block.mlp(block.ln_2(states))


def _at(states: Tensor, chosen: Tensor) -> Tensor:
    """[b, L, w], [b, L] with one True in each row -> [b, w]."""
    return (states * chosen.unsqueeze(-1)).sum(dim=1)
