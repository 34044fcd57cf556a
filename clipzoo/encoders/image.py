"""Image towers over timm's and open_clip's trunks, without their projections.

A tower maps float images [b, 3, H, W] to Features and has a `width`. timm and open_clip are imported when a
tower is built, because each import takes a second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from clipzoo.encoders.base import ImageTower, Tower
from clipzoo.encoders.last_block import (
    open_clip_vit_at_first,
    pools_first_of_timm,
    timm_vit_at_first,
)
from clipzoo.encoders.timm_trunks import gives_tokens, memory_layout, timm_blocks, timm_trunk, tokens_of
from clipzoo.errors import ConfigError
from clipzoo.io.weights import import_alone
from clipzoo.types import Count, Features, Layers, Side, checked


@checked
class TimmTower(ImageTower):
    """Any timm trunk. Tokens: all tokens after the final norm (CLS first), or the positions of a feature map.

    Pooled features are those of timm's `forward_head(pre_logits=True)`. A trunk whose tokens have another width than
    them, such as MobileNetV3, gives no tokens. Convolutional trunks use channels-last memory, the fastest layout for
    their kernels.

    name: timm's model name. image_size: H = W; None for the size that the model is made for.
    pretrained: load timm's weights. options: arguments of timm's model (drop_path_rate, ...), of `timm_trunks.OPTIONS`.
    checkpoint: recompute activations in the backward pass instead of keeping them.
    """

    trunk: Any

    def __init__(
        self,
        name: str,
        image_size: Side | None,
        pretrained: bool,
        options: dict[str, Any],
        checkpoint: bool = False,
    ) -> None:
        super().__init__()
        self.trunk = timm_trunk(name, image_size, pretrained, options)
        patch = getattr(getattr(self.trunk, "patch_embed", None), "patch_size", (1, 1))
        own_size = self.trunk.pretrained_cfg["input_size"][-1]
        if image_size not in (None, own_size) and any(image_size % side for side in patch):
            raise ConfigError(
                f"encoder.image_size={image_size} must be a multiple of the patches of {name}, {patch[0]}"
            )
        if checkpoint:
            self.trunk.set_grad_checkpointing()
        settings = self.trunk.pretrained_cfg
        self.width = getattr(self.trunk, "head_hidden_size", None) or self.trunk.num_features
        self.input_size = image_size or settings["input_size"][-1]
        self.mean, self.std = settings["mean"], settings["std"]
        self._layout = memory_layout(self.trunk)
        self.trunk.to(memory_format=self._layout)
        self._pools_first = pools_first_of_timm(self.trunk)

    @property
    def description(self) -> str:
        return f"timm's {self.trunk.pretrained_cfg['architecture']}"

    def forward(self, image: Tensor) -> Features:
        features = self.trunk.forward_features(image.contiguous(memory_format=self._layout))
        return Features(self.trunk.forward_head(features, pre_logits=True), tokens_of(self.trunk, features, self.width))

    def pooled(self, image: Tensor) -> Tensor:
        if not self._pools_first:
            return self(image).pooled
        return self.trunk.forward_head(timm_vit_at_first(self.trunk, image), pre_logits=True)

    def gives_tokens(self) -> bool:
        return gives_tokens(self)

    def layers(self) -> list[nn.Module]:
        return timm_blocks(self.trunk)


@checked
class ClipViT(Tower):
    """open_clip's vision transformer, with its norm before the blocks. Tokens: CLS first, after ln_post.

    image_size: H = W. patch_size: side of a patch in pixels. width: width of the tokens. layers: number of blocks.
    heads: number of attention heads. quick_gelu: x sigmoid(1.702 x) instead of GELU.
    checkpoint: recompute activations in the backward pass.
    """

    relations = {
        "image_size % patch_size == 0": "image_size must be a multiple of patch_size",
        "width % heads == 0": "width must be a multiple of heads",
    }
    derived = {"tokens": "(image_size // patch_size) ** 2 + 1"}

    def __init__(
        self,
        image_size: Side,
        patch_size: Count,
        width: Count,
        layers: Layers,
        heads: Count,
        quick_gelu: bool,
        checkpoint: bool = False,
    ) -> None:
        super().__init__()
        transformer = import_alone("open_clip.transformer")
        self.width = width
        self.trunk = transformer.VisionTransformer(
            image_size=image_size,
            patch_size=patch_size,
            width=width,
            layers=layers,
            heads=heads,
            mlp_ratio=4.0,
            act_layer=transformer.QuickGELU if quick_gelu else nn.GELU,
            output_dim=width,
        )
        self.trunk.proj = None
        self.trunk.set_grad_checkpointing(checkpoint)

    def forward(self, image: Tensor) -> Features:
        trunk = self.trunk
        tokens = trunk.ln_post(trunk.transformer(trunk._embeds(image)))
        return Features(tokens[:, 0], tokens)

    def pooled(self, image: Tensor) -> Tensor:
        return self.trunk.ln_post(open_clip_vit_at_first(self.trunk, image))

    def layers(self) -> list[nn.Module]:
        return list(self.trunk.transformer.resblocks)


@checked
class ClipResNet(Tower):
    """CLIP's modified ResNet with attention pooling, stopped before the pooling's output projection.

    image_size: H = W. checkpoint: recompute activations in the backward pass.
    layers: blocks per stage, [3, 4, 6, 3] for ResNet-50. stem_width: 64 for ResNet-50; the features are 32 times as
    wide. heads: number of heads of the attention pooling. Tokens: the last feature map's positions.
    """

    relations = {
        "image_size % 32 == 0": "image_size must be a multiple of 32",
        "stem_width % 2 == 0": "stem_width must be even",
        "32 * stem_width % heads == 0": "the width of the features, 32 stem_width, must be a multiple of heads",
    }
    derived = {"tokens": "(image_size // 32) ** 2", "width": "32 * stem_width"}

    def __init__(
        self,
        image_size: Side,
        layers: tuple[Layers, Layers, Layers, Layers],
        stem_width: Count,
        heads: Count,
        checkpoint: bool = False,
    ) -> None:
        super().__init__()
        modified_resnet = import_alone("open_clip.modified_resnet")
        self.width = 32 * stem_width
        self.trunk = modified_resnet.ModifiedResNet(layers, self.width, heads, image_size, stem_width)
        # The head owns the output projection; the identity keeps open_clip's other parameter names.
        self.trunk.attnpool.c_proj = nn.Identity()
        self.trunk.to(memory_format=torch.channels_last)
        self.checkpoint = checkpoint

    def forward(self, image: Tensor) -> Features:
        return resnet_features(self.trunk, image, self.checkpoint and self.training)

    def layers(self) -> list[nn.Module]:
        return resnet_blocks(self.trunk)


def resnet_features(trunk: Any, image: Tensor, recompute: bool) -> Features:
    """Features of open_clip's modified ResNet without its output projection. recompute: activations of the stages."""
    features = trunk.stem(image.contiguous(memory_format=torch.channels_last))
    for stage in (trunk.layer1, trunk.layer2, trunk.layer3, trunk.layer4):
        features = checkpoint(stage, features, use_reentrant=False) if recompute else stage(features)
    tokens = features.flatten(2).mT  # [b, w, h', w'] -> [b, M, w]
    return Features(_attention_pool(trunk.attnpool, tokens), tokens)


def resnet_blocks(trunk: Any) -> list[nn.Module]:
    """Return the residual blocks of open_clip's modified ResNet."""
    return [block for stage in (trunk.layer1, trunk.layer2, trunk.layer3, trunk.layer4) for block in stage]


def _attention_pool(pool: Any, tokens: Tensor) -> Tensor:
    """[b, M, w] -> [b, w]: one query, the mean of the tokens, attends to itself and to all tokens."""
    keys = torch.cat([tokens.mean(dim=1, keepdim=True), tokens], dim=1)
    keys = keys + pool.positional_embedding.to(keys.dtype)

    def by_head(projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (pool.num_heads, -1)).transpose(1, 2)

    attended = functional.scaled_dot_product_attention(
        by_head(pool.q_proj(keys[:, :1])), by_head(pool.k_proj(keys)), by_head(pool.v_proj(keys))
    )
    return attended.transpose(1, 2).flatten(1)
