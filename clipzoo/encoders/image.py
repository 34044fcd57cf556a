"""Image towers over timm's and open_clip's trunks, without their projections.

timm and open_clip are imported when a tower is built, because each import takes a second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from clipzoo.encoders.base import ImageTower, call_as_forward, recompute_blocks
from clipzoo.errors import ConfigError, nearest, one_message
from clipzoo.io import MB, read_json
from clipzoo.io.weights import from_hub, import_alone, require_bounded
from clipzoo.types import Count, Features, Layers, Side, checked

LISTS = nn.Sequential | nn.ModuleList
STAGES = ("blocks", "stages", "layers", "levels", "features", "network", "s")
"""Names that timm's trunks give to their sequence of blocks, or of stages of blocks."""
OPTIONS = (
    "drop_rate", "drop_path_rate", "drop_block_rate", "attn_drop_rate", "proj_drop_rate", "pos_drop_rate",
    "patch_drop_rate", "img_size", "patch_size", "embed_dim", "embed_dims", "depth", "depths", "dims", "layers",
    "num_heads", "mlp_ratio", "window_size", "kernel_size", "strides", "qkv_bias", "qk_norm", "init_values",
    "ls_init_value", "class_token", "reg_tokens", "no_embed_class", "pre_norm", "fc_norm", "final_norm", "pos_embed",
    "use_rot_pos_emb", "dynamic_img_size", "dynamic_img_pad", "strict_img_size", "global_pool", "act_layer",
    "norm_layer", "num_classes", "in_chans",
)  # fmt: skip
"""Arguments of timm's models that a configuration may set: sizes, rates and names of layers. Others are refused, such
as checkpoint_path and pretrained_cfg, because they name files and addresses."""


class TrunkTower(ImageTower):
    """Base class of towers over a trunk of timm or open_clip, which they run up to its last projection.

    For heads that read no tokens, the last block of a plain vision transformer runs only at the pooled position, with
    all positions as keys and values.
    """

    trunk: Any
    is_timm = is_resnet = False

    def set_trunk(self, trunk: Any, checkpoint: int, is_timm: bool = False, is_resnet: bool = False) -> None:
        """Set the trunk: a model of timm, open_clip's modified ResNet, or else its vision transformer."""
        self.trunk, self.is_timm, self.is_resnet = trunk, is_timm, is_resnet
        self._pools_first = False
        recompute_blocks(self.layers(), checkpoint)
        if is_timm:
            from timm.models.vision_transformer import Attention, Block, VisionTransformer

            # timm declares the size of the last feature map of convolutional trunks; channels-last is the fastest
            # layout for their kernels.
            convolutional = trunk.pretrained_cfg.get("pool_size") is not None
            self._layout = torch.channels_last if convolutional else torch.contiguous_format
            trunk.to(memory_format=self._layout)
            if type(trunk) is VisionTransformer and trunk.global_pool == "token" and trunk.attn_pool is None:
                block = trunk.blocks[-1]
                is_plain = type(block) is Block and type(block.attn) is Attention
                # Dropout would draw other numbers than in timm's forward pass.
                drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in block.modules())
                self._pools_first = is_plain and getattr(block.attn, "gate", None) is None and not drops
        elif not is_resnet:
            block_class = import_alone("open_clip.transformer").ResidualAttentionBlock
            at_class_token = trunk.attn_pool is None and trunk.pool_type == "tok"
            self._pools_first = at_class_token and type(trunk.transformer.resblocks[-1]) is block_class

    def pool(self, features: Tensor) -> Tensor:
        """Return the pooled features, [b, w], of the result of timm's `forward_features`."""
        return self.trunk.forward_head(features, pre_logits=True)

    def forward(self, image: Tensor) -> Features:
        trunk = self.trunk
        if self.is_timm:
            features = trunk.forward_features(image.contiguous(memory_format=self._layout))
            pooled = self.pool(features)
            if not isinstance(features, Tensor) or features.dim() not in (3, 4):
                return Features(pooled)
            if features.dim() == 4:
                # [b, h', w', w] in trunks such as Swin, [b, w, h', w'] in all others.
                is_channels_last = getattr(trunk, "output_fmt", "NCHW") == "NHWC"
                features = features.flatten(1, 2) if is_channels_last else features.flatten(2).mT
            return Features(pooled, features if features.shape[-1] == self.width else None)
        if self.is_resnet:
            features = trunk.stem(image.contiguous(memory_format=torch.channels_last))
            for stage in (trunk.layer1, trunk.layer2, trunk.layer3, trunk.layer4):
                features = stage(features)
            tokens = features.flatten(2).mT  # [b, w, h', w'] -> [b, M, w]
            # One query, the mean of the tokens, attends to itself and to all tokens.
            pool = trunk.attnpool
            keys = torch.cat([tokens.mean(dim=1, keepdim=True), tokens], dim=1)
            keys = keys + pool.positional_embedding.to(keys.dtype)
            projected = pool.q_proj(keys[:, :1]), pool.k_proj(keys), pool.v_proj(keys)
            query, key, value = (part.unflatten(-1, (pool.num_heads, -1)).transpose(1, 2) for part in projected)
            attended = functional.scaled_dot_product_attention(query, key, value)
            return Features(attended.transpose(1, 2).flatten(1), tokens)
        states = trunk.transformer(trunk._embeds(image))
        if trunk.attn_pool is not None:
            return Features(*trunk._pool(states))
        if trunk.final_ln_after_pool:
            pooled, tokens = trunk._pool(states)
            return Features(pooled, trunk.ln_post(tokens))
        tokens = trunk.ln_post(states)
        return Features(trunk._global_pool(tokens)[0], tokens)

    def pooled(self, image: Tensor) -> Tensor:
        if not self._pools_first:
            return self(image).pooled
        trunk = self.trunk
        if self.is_timm:
            states = trunk.norm_pre(trunk.patch_drop(trunk._pos_embed(trunk.patch_embed(image))))
            *blocks, last = trunk.blocks
        else:
            states = trunk._embeds(image)
            *blocks, last = trunk.transformer.resblocks
        for block in blocks:
            states = block(states)
        if self.is_timm:
            return self.pool(trunk.norm(call_as_forward(last, _timm_block_at_first, states)))
        return trunk.ln_post(call_as_forward(last, open_clip_block_at, states, states[:, 0]))

    def layers(self) -> list[nn.Module]:
        trunk = self.trunk
        if self.is_resnet:
            return [block for stage in (trunk.layer1, trunk.layer2, trunk.layer3, trunk.layer4) for block in stage]
        if not self.is_timm:
            return list(trunk.transformer.resblocks)
        # Stages are attributes of the trunk or one sequence; the blocks are lists inside them, or the stages.
        stages = [module for name, module in trunk.named_children() if re.fullmatch(r"(layer|stage|network)_?\d", name)]
        if len(stages) < 2:
            parts = [module for module in trunk.children() if any(True for _ in module.parameters())]
            sequences = (getattr(trunk, name, None) for name in STAGES)
            stages = next((list(part) for part in sequences if isinstance(part, LISTS)), parts)
        blocks: list[nn.Module] = []
        for stage in stages:
            inside = [stage, *(getattr(stage, name, ()) for name in ("blocks", "layers"))]
            lists = [part for part in inside if isinstance(part, LISTS) and (part is stage or len(part))]
            blocks += lists[0] if lists else [stage]
        return blocks


@checked
class TimmTower(TrunkTower):
    """Any timm trunk. Tokens: all tokens after the final norm (CLS first), or the positions of a feature map.

    Pooled features are those of timm's `forward_head(pre_logits=True)`. A trunk whose tokens have another width,
    such as MobileNetV3, gives no tokens.

    name: timm's model name. image_size: H = W; None for the size that the model is made for.
    pretrained: load timm's weights. options: arguments of timm's model (drop_path_rate, ...), of OPTIONS.
    checkpoint: recompute activations in the backward pass instead of keeping them; a number: of every k-th block only.
    """

    def __init__(
        self,
        name: str,
        image_size: Side | None,
        pretrained: bool,
        options: dict[str, Any],
        checkpoint: bool | Count = False,
    ) -> None:
        super().__init__()
        trunk = timm_trunk(name, image_size, pretrained, options)
        patch = getattr(getattr(trunk, "patch_embed", None), "patch_size", (1, 1))
        settings = trunk.pretrained_cfg
        own_size = settings["input_size"][-1]
        if image_size not in (None, own_size) and any(image_size % side for side in patch):
            raise ConfigError(
                f"encoder.image_size={image_size} must be a multiple of the patches of {name}, {patch[0]}"
            )
        self.width = getattr(trunk, "head_hidden_size", None) or trunk.num_features
        self.input_size = image_size or own_size
        self.mean, self.std = settings["mean"], settings["std"]
        self.description = f"timm's {settings['architecture']}"
        self.set_trunk(trunk, checkpoint, is_timm=True)


@checked
class ClipViT(TrunkTower):
    """open_clip's vision transformer, with its norm before the blocks. Tokens: CLS first, after ln_post.

    image_size: H = W. patch_size: side of a patch in pixels. width: width of the tokens. layers: number of blocks.
    heads: number of attention heads. quick_gelu: x sigmoid(1.702 x) instead of GELU.
    checkpoint: recompute activations in the backward pass instead of keeping them; a number: of every k-th block only.
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
        checkpoint: bool | Count = False,
    ) -> None:
        super().__init__()
        transformer = import_alone("open_clip.transformer")
        self.width = width
        trunk = transformer.VisionTransformer(
            image_size=image_size,
            patch_size=patch_size,
            width=width,
            layers=layers,
            heads=heads,
            mlp_ratio=4.0,
            act_layer=transformer.QuickGELU if quick_gelu else nn.GELU,
            output_dim=width,
        )
        trunk.proj = None
        self.set_trunk(trunk, checkpoint)


@checked
class ClipResNet(TrunkTower):
    """CLIP's modified ResNet with attention pooling, stopped before the pooling's output projection.

    image_size: H = W. checkpoint: recompute activations in the backward pass; a number: of every k-th block only.
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
        checkpoint: bool | Count = False,
    ) -> None:
        super().__init__()
        self.width = 32 * stem_width
        modified_resnet = import_alone("open_clip.modified_resnet")
        trunk = modified_resnet.ModifiedResNet(layers, self.width, heads, image_size, stem_width)
        # The head owns the output projection; the identity keeps open_clip's other parameter names.
        trunk.attnpool.c_proj = nn.Identity()
        trunk.to(memory_format=torch.channels_last)
        self.set_trunk(trunk, checkpoint, is_resnet=True)


def timm_trunk(name: str, image_size: int | None, pretrained: bool, options: dict[str, Any]) -> Any:
    """Return timm's model without its classifier; see `TimmTower`. name: in timm's registry, "hf-hub:OWNER/MODEL" or
    "local-dir:FOLDER".

    Raises ConfigError if timm has no such model, refuses the size, or cannot download the weights, or if an option, or
    an argument in the model's config.json, is not in OPTIONS.
    """
    import timm

    source, _, place = name.rpartition(":")
    if not timm.is_model(name) and not source:
        raise ConfigError(f"name={name}: timm has no such model{nearest(name, timm.list_models(), most=3)}")
    require_listed(options, OPTIONS, "options.", f"timm's {name}")
    arguments_text = f"name={name}, image_size={image_size}, pretrained={pretrained}, options={options}"
    remedy = "Without a network, give pretrained=false" if pretrained else ""
    message = f"timm cannot build the image tower {arguments_text}", remedy
    with from_hub(name, *message) if pretrained or source else one_message(*message):
        if source:
            if Path(place).is_dir():
                for file in sorted(Path(place).iterdir()):
                    if file.suffix in (".safetensors", ".bin", ".pth", ".pt"):
                        require_bounded(file)
                config_file = Path(place) / "config.json"
            else:
                from huggingface_hub import hf_hub_download

                config_file = Path(hf_hub_download(place, "config.json"))
            arguments = read_json(config_file, MB).get("model_args", {})
            require_listed(arguments, OPTIONS, f"{place}/config.json: model_args.", f"timm's {name}")
        timm_config = None if source else timm.get_pretrained_cfg(name)
        takes_any_size = timm_config is not None and not timm_config.fixed_input_size
        size: dict[str, Any] = {} if image_size is None or takes_any_size else {"img_size": image_size}
        return timm.create_model(name, pretrained=pretrained, num_classes=0, **size, **options)


def require_listed(options: Mapping[str, Any], allowed: Sequence[str], place: str, model: str) -> None:
    """Raise ConfigError if an option is not in the list of those that read no file and import no code."""
    for option in options:
        if option not in allowed:
            raise ConfigError(
                f"{place}{option}: {model} has no such option{nearest(option, allowed, most=3)}; a configuration may "
                f"set {', '.join(allowed)}"
            )


def open_clip_block_at(block: Any, states: Tensor, state: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return open_clip's residual attention block at one position of each row, [b, w].

    states: [b, L, w]. state: [b, w], `states` at the position. visible: [b, L], where it attends; None: everywhere.
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


def _timm_block_at_first(block: Any, states: Tensor) -> Tensor:
    """Return timm's block at the first position, [b, 1, w]. states: [b, L, w]."""
    attention, state = block.attn, states[:, :1]
    weight, bias, width = attention.qkv.weight, attention.qkv.bias, attention.num_heads * attention.head_dim
    query_bias, key_value_bias = (None, None) if bias is None else (bias[:width], bias[width:])
    query = functional.linear(block.norm1(state), weight[:width], query_bias)
    projected = functional.linear(block.norm1(states), weight[width:], key_value_bias)
    key, value = projected.unflatten(-1, (2, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    query = query.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
    query, key = attention.q_norm(query), attention.k_norm(key)
    attended = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    attended = attention.proj_drop(attention.proj(attention.norm(attended)))
    state = state + block.drop_path1(block.ls1(attended))
    return state + block.drop_path2(block.ls2(block.mlp(block.norm2(state))))
