"""Towers of open_clip's models, without their last projections.

open_clip's own module does the work, so every architecture of its registry is here: vision transformers, modified
ResNets and timm trunks with any pooling; causal, bidirectional and CoCa's text transformers, and those of transformers.
Tensors keep open_clip's names after `trunk.`; in towers over timm and transformers, `trunk` is their model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from clipzoo.encoders.base import ImageTower, TextTower
from clipzoo.encoders.huggingface_tokenizer import require_transformers
from clipzoo.encoders.image import resnet_blocks, resnet_features
from clipzoo.encoders.last_block import (
    open_clip_vit_at_first,
    pools_first_of_open_clip,
    pools_first_of_timm,
    timm_vit_at_first,
)
from clipzoo.encoders.open_clip_projection import remove_projection
from clipzoo.encoders.open_clip_registry import describe, settings_of, tokenizer_of
from clipzoo.encoders.text import causal_state, causal_states
from clipzoo.encoders.timm_trunks import gives_tokens, memory_layout, timm_blocks, tokens_of
from clipzoo.errors import one_message
from clipzoo.types import Count, Features, Side, checked


@checked
class OpenClipImage(ImageTower):
    """The image tower of a model of open_clip.

    Tokens: the last layer after the final norm (CLS first), the queries of CoCa's attentional pooling, or the positions
    of a feature map. The last projection belongs to the head.

    name: a name in open_clip's registry, "hf-hub:OWNER/MODEL" or "local-dir:FOLDER".
    image_size: H = W; None for the model's.
    options: settings of open_clip's vision_cfg, in place of the model's (patch_dropout, timm_drop_path, ...).
    checkpoint: recompute activations in the backward pass instead of keeping them.
    """

    trunk: Any

    def __init__(self, name: str, image_size: Side | None, options: dict[str, Any], checkpoint: bool = False) -> None:
        super().__init__()
        from open_clip.model import CLIPVisionCfg, _build_vision_tower
        from open_clip.modified_resnet import ModifiedResNet
        from open_clip.timm_model import TimmModel

        described = describe(name)
        settings = settings_of(CLIPVisionCfg, described.model["vision_cfg"], options, "encoder.image")
        settings.timm_model_pretrained = False
        own_size = settings.image_size if isinstance(settings.image_size, int) else settings.image_size[0]
        self.input_size = image_size or own_size
        if not settings.timm_model_name:
            settings.image_size = self.input_size
        quick_gelu = bool(described.model.get("quick_gelu"))
        with one_message(f"the image tower of open_clip's {name}, image_size={image_size}, cannot be built"):
            built = _build_vision_tower(described.model["embed_dim"], settings, quick_gelu)
        if settings.timm_model_name and self.input_size != own_size:
            built.set_input_size(self.input_size)
        if checkpoint and not isinstance(built, ModifiedResNet):
            built.set_grad_checkpointing()
        self.width, self.embed_width = remove_projection(built), described.model["embed_dim"]
        self.mean, self.std = described.mean, described.std
        self.interpolation, self.resize_mode = described.interpolation, described.resize_mode
        self.name, self.checkpoint = name, checkpoint
        self.is_resnet, self.is_timm = isinstance(built, ModifiedResNet), isinstance(built, TimmModel)
        self.trunk = built.trunk if self.is_timm else built
        if self.is_timm:
            self.head = built.head
            self._layout = memory_layout(self.trunk)
            self.trunk.to(memory_format=self._layout)
        pools_first = pools_first_of_timm if self.is_timm else pools_first_of_open_clip
        self._pools_first = not self.is_resnet and pools_first(self.trunk)

    @property
    def description(self) -> str:
        return f"the image tower of open_clip's {self.name}"

    def forward(self, image: Tensor) -> Features:
        if self.is_resnet:
            return resnet_features(self.trunk, image, self.checkpoint and self.training)
        if self.is_timm:
            features = self.trunk.forward_features(image.contiguous(memory_format=self._layout))
            pooled = self.head(self.trunk.forward_head(features))
            return Features(pooled, tokens_of(self.trunk, features, self.width))
        return _vit_features(self.trunk, image)

    def pooled(self, image: Tensor) -> Tensor:
        if not self._pools_first:
            return self(image).pooled
        if self.is_timm:
            return self.head(self.trunk.forward_head(timm_vit_at_first(self.trunk, image)))
        return self.trunk.ln_post(open_clip_vit_at_first(self.trunk, image))

    def gives_tokens(self) -> bool:
        return gives_tokens(self)

    def layers(self) -> list[nn.Module]:
        if self.is_resnet:
            return resnet_blocks(self.trunk)
        return timm_blocks(self.trunk) if self.is_timm else list(self.trunk.transformer.resblocks)


def _vit_features(trunk: Any, image: Tensor) -> Features:
    states = trunk.transformer(trunk._embeds(image))
    if trunk.attn_pool is not None:
        pooled, tokens = trunk._pool(states)
    elif trunk.final_ln_after_pool:
        pooled, tokens = trunk._pool(states)
        tokens = trunk.ln_post(tokens)
    else:
        tokens = trunk.ln_post(states)
        pooled, _ = trunk._global_pool(tokens)
    return Features(pooled, tokens)


@checked
class OpenClipText(TextTower):
    """The text tower of a model of open_clip.

    Tokens: all positions after the final norm. The last projection belongs to the head. A causal tower runs without
    open_clip's mask tensor, and on captions of any length; a bidirectional one without a padding mask, and CoCa's,
    whose features depend on the padding, take all positions (`needs_padding`).

    name: a name in open_clip's registry, "hf-hub:OWNER/MODEL" or "local-dir:FOLDER".
    context_length: number of tokens; None for the model's.
    options: settings of open_clip's text_cfg, in place of the model's.
    checkpoint: recompute activations in the backward pass.
    """

    trunk: Any
    left_out = ("text_decoder",)
    names_elsewhere = {"trunk.": "transformer."}

    def __init__(
        self, name: str, context_length: Count | None, options: dict[str, Any], checkpoint: bool = False
    ) -> None:
        super().__init__()
        from open_clip.model import CLIPTextCfg, _build_text_tower

        described = describe(name)
        settings = settings_of(CLIPTextCfg, described.model["text_cfg"], options, "encoder.text")
        settings.hf_model_pretrained = False
        settings.context_length = self.context_length = context_length or settings.context_length
        if settings.hf_model_name:
            require_transformers(f"the text tower of open_clip's {name}")
        quick_gelu = bool(described.model.get("quick_gelu"))
        needs = f" with the configuration of {settings.hf_model_name}" if settings.hf_model_name else ""
        with one_message(f"the text tower of open_clip's {name}{needs} cannot be built"):
            built = _build_text_tower(described.model["embed_dim"], settings, quick_gelu)
        self.width, self.embed_width = remove_projection(built), described.model["embed_dim"]
        self.tokenizer = tokenizer_of(name, vars(settings), self.context_length)
        self.name, self.checkpoint = name, checkpoint
        self.is_transformers = bool(settings.hf_model_name)
        self._uses_causal_states = False
        if self.is_transformers:
            self.trunk, self.pooler, self.proj = built.transformer, built.pooler, built.proj
            self._padding = built.config.pad_token_id
            if checkpoint:
                self.trunk.gradient_checkpointing_enable()
            return
        self.trunk = built
        built.set_grad_checkpointing(checkpoint)
        causal, self._appended = built.attn_mask is not None, built.cls_emb is not None
        self._uses_causal_states = causal and not self._appended and all(map(_is_plain, built.transformer.resblocks))
        self.needs_padding = not causal or self._appended or built.pool_type == "last"
        if not self.needs_padding:
            self.end_token = built.eos_id if built.pool_type == "eos" else 49407

    @property
    def description(self) -> str:
        return f"the text tower of open_clip's {self.name}"

    def forward(self, text: Tensor) -> Features:
        if self.is_transformers:
            return self._transformers_features(text)
        trunk = self.trunk
        states = self._states(text)
        if self._appended:
            return Features(trunk.ln_final(states[:, -1]), trunk.ln_final(states[:, :-1]))
        tokens = trunk.ln_final(states)
        if trunk.pool_type in ("first", "last"):
            return Features(tokens[:, 0 if trunk.pool_type == "first" else -1], tokens)
        end = self._ends(text)
        mask = torch.arange(text.shape[1], device=text.device) <= end[:, None]  # [b, L]
        return Features(tokens[torch.arange(len(text), device=text.device), end], tokens, mask)

    def pooled(self, text: Tensor) -> Tensor:
        if not self._uses_causal_states or self.trunk.pool_type in ("first", "last"):
            return self(text).pooled
        behind = torch.arange(text.shape[1], device=text.device) - self._ends(text)[:, None]
        return self.trunk.ln_final(causal_state(self.trunk, text, behind, self.checkpoint and self.training))

    def gives_tokens(self) -> bool:
        return not self.is_transformers or isinstance(self.proj, nn.Identity)

    def layers(self) -> list[nn.Module]:
        if self.is_transformers:
            from clipzoo.encoders.huggingface import transformer_blocks

            return transformer_blocks(self.trunk)
        return list(self.trunk.transformer.resblocks)

    def _ends(self, text: Tensor) -> Tensor:
        """[b, L] -> [b], the position of the end token. CLIP's is its largest id."""
        trunk = self.trunk
        return text.argmax(dim=1) if trunk.pool_type == "argmax" else (text == trunk.eos_id).int().argmax(dim=1)

    def _states(self, text: Tensor) -> Tensor:
        """Ids [b, L] -> [b, L, w] after the last block; CoCa's with one more position."""
        trunk = self.trunk
        if self._uses_causal_states:
            return causal_states(trunk, text, self.checkpoint and self.training)
        embedded, mask = trunk._embeds(text)
        if mask is not None and mask.dim() == 2:
            mask = mask[: text.shape[1], : text.shape[1]]
        return trunk.transformer(embedded, attn_mask=mask)

    def _transformers_features(self, text: Tensor) -> Features:
        mask = text != self._padding
        output = self.trunk(input_ids=text, attention_mask=mask.long())
        pooled = self.proj(self.pooler(output, mask.long()))
        tokens = output.last_hidden_state
        return Features(pooled, tokens if tokens.shape[-1] == self.width else None, mask)


def _is_plain(block: Any) -> bool:
    """Return True for open_clip's residual attention block without layer scale."""
    from open_clip.transformer import ResidualAttentionBlock

    scales = (getattr(block, "ls_1", None), getattr(block, "ls_2", None))
    return isinstance(block, ResidualAttentionBlock) and all(isinstance(scale, nn.Identity) for scale in scales)
