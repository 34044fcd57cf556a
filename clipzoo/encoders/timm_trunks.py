"""Tokens and blocks of timm's trunks, which name and lay them out in several ways."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clipzoo.encoders.base import ImageTower
from clipzoo.errors import ConfigError, nearest, one_message
from clipzoo.io import MB, read_json
from clipzoo.io.weights import from_hub, require_bounded

STAGES = ("blocks", "stages", "layers", "levels", "features", "network", "s")
"""Names that timm's trunks give to their sequence of blocks, or of stages of blocks."""
NUMBERED = re.compile(r"(layer|stage|network)_?\d")
"""Stages that are attributes of the trunk."""
BLOCKS = ("blocks", "layers")
"""Names of the sequence of blocks inside a stage."""

OPTIONS = (
    "drop_rate", "drop_path_rate", "drop_block_rate", "attn_drop_rate", "proj_drop_rate", "pos_drop_rate",
    "patch_drop_rate", "img_size", "patch_size", "embed_dim", "embed_dims", "depth", "depths", "dims", "layers",
    "num_heads", "mlp_ratio", "window_size", "kernel_size", "strides", "qkv_bias", "qk_norm", "init_values",
    "ls_init_value", "class_token", "reg_tokens", "no_embed_class", "pre_norm", "fc_norm", "final_norm", "pos_embed",
    "use_rot_pos_emb", "dynamic_img_size", "dynamic_img_pad", "strict_img_size", "global_pool", "act_layer",
    "norm_layer", "num_classes", "in_chans",
)  # fmt: skip
"""Arguments of timm's models that a configuration may set: sizes, rates and names of layers. Others, such as
checkpoint_path and pretrained_cfg, name files and addresses."""


def timm_trunk(name: str, image_size: int | None, pretrained: bool, options: dict[str, Any]) -> Any:
    """Return timm's model without its classifier; see `TimmTower`. Name: of timm's registry, "hf-hub:OWNER/MODEL" or
    "local-dir:FOLDER".

    Raises:
        ConfigError: timm has no such model, refuses the size, or cannot download the weights; an option, or an argument
            in the model's config.json, is none of OPTIONS.
    """
    import timm

    source, _, place = name.rpartition(":")
    if not timm.is_model(name) and not source:
        raise ConfigError(f"name={name}: timm has no such model{nearest(name, timm.list_models(), most=3)}")
    _require_listed(options, "options.", name)
    given = f"name={name}, image_size={image_size}, pretrained={pretrained}, options={options}"
    remedy = "Without a network, give pretrained=false" if pretrained else ""
    message = f"timm cannot build the image tower {given}", remedy
    with from_hub(name, *message) if pretrained or source else one_message(*message):
        if source:
            _require_listed(_arguments(place), f"{place}/config.json: model_args.", name)
        known = None if source else timm.get_pretrained_cfg(name)
        settings = known.to_dict() if known else {}
        size: dict[str, Any] = {} if image_size is None else {"img_size": image_size}
        if settings and not settings.get("fixed_input_size"):
            size = {}
        return timm.create_model(name, pretrained=pretrained, num_classes=0, **size, **options)


def _arguments(place: str) -> Any:
    """Return the arguments of timm's model in a folder or on the hub; its weights in the folder must be bounded."""
    folder = Path(place)
    if not folder.is_dir():
        from huggingface_hub import hf_hub_download

        return read_json(Path(hf_hub_download(place, "config.json")), MB).get("model_args", {})
    for file in sorted(folder.iterdir()):
        if file.suffix in (".safetensors", ".bin", ".pth", ".pt"):
            require_bounded(file)
    return read_json(folder / "config.json", MB).get("model_args", {})


def _require_listed(options: Mapping[str, Any], place: str, name: str) -> None:
    """Raise ConfigError if an option is none of OPTIONS, which read no file and import no code."""
    for option in options:
        if option not in OPTIONS:
            raise ConfigError(
                f"{place}{option} is not an option of timm's {name} that a configuration may set"
                f"{nearest(option, OPTIONS, most=3)}; the options are {', '.join(OPTIONS)}"
            )


def memory_layout(trunk: Any) -> torch.memory_format:
    """Return channels-last for convolutional trunks, of which timm declares the size of the last feature map."""
    return torch.contiguous_format if trunk.pretrained_cfg.get("pool_size") is None else torch.channels_last


def tokens_of(trunk: Any, features: Any, width: int) -> Tensor | None:
    """Result of `forward_features` -> tokens [b, M, w]; None if there are none, or of another width than `width`."""
    if not isinstance(features, Tensor) or features.dim() not in (3, 4):
        return None
    if features.dim() == 4:
        # [b, h', w', w] in trunks such as Swin, [b, w, h', w'] in all others.
        last = getattr(trunk, "output_fmt", "NCHW") == "NHWC"
        features = features.flatten(1, 2) if last else features.flatten(2).mT
    return features if features.shape[-1] == width else None


@torch.no_grad()
def gives_tokens(tower: ImageTower) -> bool:
    """Run the tower on one black image and return True if it gives tokens."""
    was_training = tower.training
    some = next(tower.parameters())
    image = torch.zeros(1, 3, tower.input_size, tower.input_size, dtype=some.dtype, device=some.device)
    try:
        return tower.eval()(image).tokens is not None
    finally:
        tower.train(was_training)


def timm_blocks(trunk: nn.Module) -> list[nn.Module]:
    """Return the blocks of a trunk in order; the stages where these hold no list of blocks."""
    return [block for stage in _stages(trunk) for block in _blocks(stage)]


def _stages(trunk: nn.Module) -> Iterator[nn.Module]:
    numbered = [module for name, module in trunk.named_children() if NUMBERED.fullmatch(name)]
    if len(numbered) > 1:
        yield from numbered
        return
    for name in STAGES:
        if isinstance(stages := getattr(trunk, name, None), nn.Sequential | nn.ModuleList):
            yield from stages
            return
    yield from (module for module in trunk.children() if any(True for _ in module.parameters()))


def _blocks(stage: nn.Module) -> list[nn.Module]:
    if isinstance(stage, nn.Sequential | nn.ModuleList):
        return list(stage)
    for name in BLOCKS:
        if isinstance(blocks := getattr(stage, name, None), nn.Sequential | nn.ModuleList) and len(blocks):
            return list(blocks)
    return [stage]
