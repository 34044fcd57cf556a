"""Towers of open_clip's models, without their last projections.

The modules are open_clip's, so every architecture of its registry is available: vision transformers, modified
ResNets and timm trunks with any pooling; causal, bidirectional and CoCa's text transformers, and those of transformers.
Tensors keep open_clip's names after `trunk.`; in towers over timm and transformers, `trunk` is their model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from clipzoo.encoders.base import TextTower, longest_list, recompute_blocks
from clipzoo.encoders.huggingface import CLIP_TOKENIZER, require_own_code, require_transformers
from clipzoo.encoders.image import TrunkTower, require_listed
from clipzoo.encoders.text import causal_states
from clipzoo.errors import ConfigError, nearest, one_message
from clipzoo.io import MB, read_json, require_fields
from clipzoo.io.files import shortened
from clipzoo.io.weights import from_hub
from clipzoo.types import Count, Features, Side, checked

FOLDER, HUB = "local-dir:", "hf-hub:"
FILE = "open_clip_config.json"
REMEDY = "export the model again"
OPTIONS = (
    "width", "layers", "heads", "head_width", "mlp_ratio", "patch_size", "image_size", "context_length", "vocab_size",
    "patch_dropout", "ls_init_value", "attentional_pool", "attn_pooler_queries", "attn_pooler_heads", "no_ln_pre",
    "pos_embed_type", "final_ln_after_pool", "pool_type", "embed_cls", "pad_id", "eos_id", "no_causal_mask",
    "proj_bias", "proj_type", "output_tokens", "act_kwargs", "norm_kwargs", "block_type", "qk_norm",
    "scaled_cosine_attn", "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc", "timm_pool", "timm_proj",
    "timm_proj_bias", "timm_drop", "timm_drop_path", "hf_proj_type", "hf_pooler_type",
)  # fmt: skip
"""Settings of open_clip's towers that the options of a configuration may set. Others are refused, because they name
models of other libraries, their weights and tokenizers."""
MODEL_FIELDS = {"embed_dim": int, "vision_cfg": dict, "text_cfg": dict}
Triple = tuple[float, float, float]
T = TypeVar("T")


@checked
class OpenClipImage(TrunkTower):
    """The image tower of a model of open_clip.

    Tokens: the last layer after the final norm (CLS first), the queries of CoCa's attentional pooling, or the positions
    of a feature map. The last projection belongs to the head.

    name: a name in open_clip's registry, "hf-hub:OWNER/MODEL" or "local-dir:FOLDER".
    image_size: H = W; None for the model's.
    options: settings of open_clip's vision_cfg, in place of the model's (patch_dropout, timm_drop_path, ...).
    checkpoint: recompute activations in the backward pass instead of keeping them; a number: of every k-th block only.
    """

    def __init__(
        self, name: str, image_size: Side | None, options: dict[str, Any], checkpoint: bool | Count = False
    ) -> None:
        super().__init__()
        from open_clip.model import CLIPVisionCfg, _build_vision_tower
        from open_clip.modified_resnet import ModifiedResNet
        from open_clip.timm_model import TimmModel

        description = describe(name)
        settings = settings_of(CLIPVisionCfg, description.model["vision_cfg"], options, "encoder.image")
        settings.timm_model_pretrained = False
        own_size = settings.image_size if isinstance(settings.image_size, int) else settings.image_size[0]
        self.input_size = image_size or own_size
        if not settings.timm_model_name:
            settings.image_size = self.input_size
        quick_gelu = bool(description.model.get("quick_gelu"))
        with one_message(f"the image tower of open_clip's {name}, image_size={image_size}, cannot be built"):
            tower = _build_vision_tower(description.model["embed_dim"], settings, quick_gelu)
        if settings.timm_model_name and self.input_size != own_size:
            tower.set_input_size(self.input_size)
        self.width, self.embed_width = remove_projection(tower), description.model["embed_dim"]
        self.mean, self.std = description.mean, description.std
        self.interpolation, self.resize_mode = description.interpolation, description.resize_mode
        self.description = f"the image tower of open_clip's {name}"
        if isinstance(tower, TimmModel):
            self.set_trunk(tower.trunk, checkpoint, is_timm=True)
            self.head = tower.head
        else:
            self.set_trunk(tower, checkpoint, is_resnet=isinstance(tower, ModifiedResNet))

    def pool(self, features: Tensor) -> Tensor:
        return self.head(self.trunk.forward_head(features))


@checked
class OpenClipText(TextTower):
    """The text tower of a model of open_clip.

    Tokens: all positions after the final norm. The last projection belongs to the head. A causal tower runs without
    open_clip's mask tensor, on captions of any length. Bidirectional towers without a padding mask and CoCa's, whose
    features depend on the padding, take all positions (`needs_padding`).

    name: a name in open_clip's registry, "hf-hub:OWNER/MODEL" or "local-dir:FOLDER".
    context_length: number of tokens; None for the model's.
    options: settings of open_clip's text_cfg, in place of the model's.
    checkpoint: recompute activations in the backward pass; a number: of every k-th block only.
    """

    trunk: Any
    left_out = ("text_decoder",)
    names_elsewhere = {"trunk.": "transformer."}

    def __init__(
        self, name: str, context_length: Count | None, options: dict[str, Any], checkpoint: bool | Count = False
    ) -> None:
        super().__init__()
        from open_clip.model import CLIPTextCfg, _build_text_tower
        from open_clip.transformer import ResidualAttentionBlock

        description = describe(name)
        settings = settings_of(CLIPTextCfg, description.model["text_cfg"], options, "encoder.text")
        settings.hf_model_pretrained = False
        settings.context_length = self.context_length = context_length or settings.context_length
        if settings.hf_model_name:
            require_transformers(f"the text tower of open_clip's {name}")
        quick_gelu = bool(description.model.get("quick_gelu"))
        needs = f" with the configuration of {settings.hf_model_name}" if settings.hf_model_name else ""
        with one_message(f"the text tower of open_clip's {name}{needs} cannot be built"):
            tower = _build_text_tower(description.model["embed_dim"], settings, quick_gelu)
        self.width, self.embed_width = remove_projection(tower), description.model["embed_dim"]
        self.tokenizer = {"_target_": CLIP_TOKENIZER, "context_length": self.context_length}
        if settings.hf_tokenizer_name:
            if settings.tokenizer_mode:
                raise ConfigError(f"{name}: there is no tokenizer with mode {settings.tokenizer_mode}")
            cleaning = settings.tokenizer_kwargs or {}
            self.tokenizer = {
                "_target_": "clipzoo.encoders.huggingface.HuggingFaceTokenizer",
                "name": name.removeprefix(FOLDER) if name.startswith(FOLDER) else settings.hf_tokenizer_name,
                "context_length": self.context_length,
                "clean": cleaning.get("clean", "whitespace"),
                "strip_end": cleaning.get("strip_sep_token", False),
            }
        self.description = f"the text tower of open_clip's {name}"
        self.is_transformers = bool(settings.hf_model_name)
        self._uses_causal_states = False
        if self.is_transformers:
            self.trunk, self.pooler, self.proj = tower.transformer, tower.pooler, tower.proj
            self._padding = tower.config.pad_token_id
            self.trunk.config.use_cache = False
        else:
            self.trunk = tower
        recompute_blocks(self.layers(), checkpoint)
        if self.is_transformers:
            return
        is_causal, self._appended = tower.attn_mask is not None, tower.cls_emb is not None
        # open_clip's residual attention blocks without layer scale.
        is_plain = all(
            isinstance(block, ResidualAttentionBlock) and type(block.ls_1) is type(block.ls_2) is nn.Identity
            for block in tower.transformer.resblocks
        )
        self._uses_causal_states = is_causal and not self._appended and is_plain
        self.needs_padding = not is_causal or self._appended or tower.pool_type == "last"
        if not self.needs_padding:
            self.end_token = tower.eos_id if tower.pool_type == "eos" else 49407

    def forward(self, text: Tensor) -> Features:
        if self.is_transformers:
            mask = text != self._padding
            output = self.trunk(input_ids=text, attention_mask=mask.long())
            pooled = self.proj(self.pooler(output, mask.long()))
            tokens = output.last_hidden_state
            return Features(pooled, tokens if tokens.shape[-1] == self.width else None, mask)
        trunk = self.trunk
        if self._uses_causal_states:
            states = causal_states(trunk, text)
        else:
            embedded, mask = trunk._embeds(text)
            if mask is not None and mask.dim() == 2:
                mask = mask[: text.shape[1], : text.shape[1]]
            states = trunk.transformer(embedded, attn_mask=mask)
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
        offset = torch.arange(text.shape[1], device=text.device) - self._ends(text)[:, None]
        return self.trunk.ln_final(causal_states(self.trunk, text, offset))

    def gives_tokens(self) -> bool:
        return not self.is_transformers or isinstance(self.proj, nn.Identity)

    def layers(self) -> list[nn.Module]:
        if self.is_transformers:
            return longest_list(self.trunk, nn.ModuleList)
        return list(self.trunk.transformer.resblocks)

    def _ends(self, text: Tensor) -> Tensor:
        """[b, L] -> [b], the position of the end token. CLIP's is its largest id."""
        trunk = self.trunk
        return text.argmax(dim=1) if trunk.pool_type == "argmax" else (text == trunk.eos_id).int().argmax(dim=1)


@dataclass(frozen=True)
class Description:
    """A model of open_clip: its configuration (embed_dim, vision_cfg, text_cfg, ...) and preprocessing of images."""

    model: Mapping[str, Any]
    mean: Triple
    std: Triple
    interpolation: str
    resize_mode: str


def describe(name: str) -> Description:
    """Return open_clip's model `name`, "hf-hub:OWNER/MODEL" or "local-dir:FOLDER"; ConfigError if there is none.

    Models of the registry have the preprocessing of their weights, or CLIP's where tags differ.
    """
    import open_clip
    from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
    from open_clip.factory import _get_hf_config
    from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model

    if name.startswith(FOLDER):
        path = Path(name.removeprefix(FOLDER)) / FILE
        content = read_json(path, MB, REMEDY, fields={"model_cfg": dict})
        require_fields(path, content["model_cfg"], MODEL_FIELDS, REMEDY)
    elif name.startswith(HUB):
        with from_hub(name, f"{name} cannot be read from the Hugging Face hub"):
            content = _get_hf_config(name.removeprefix(HUB))
        if not isinstance(model := content.get("model_cfg"), Mapping) or not model.keys() >= MODEL_FIELDS.keys():
            raise ConfigError(f"{name} is not a model of open_clip: its {FILE} has no model_cfg of two towers")
    else:
        registered = name.replace("/", "-")
        model_config = open_clip.get_model_config(registered)
        if model_config is None:
            near = nearest(name, open_clip.list_models(), most=3)
            raise ConfigError(f"open_clip has no model {name}{near or ', and there is no such folder'}")
        tags = [get_pretrained_cfg(registered, tag) for tag in list_pretrained_tags_by_model(registered)]
        shared = {key: [tag.get(key) for tag in tags] for key in ("mean", "std", "interpolation", "resize_mode")}
        common = {key: part[0] for key, part in shared.items() if part and part.count(part[0]) == len(part)}
        content = {"model_cfg": model_config, "preprocess_cfg": common}
    if name.startswith((FOLDER, HUB)):
        # Untrusted towers must be ones that timm or transformers has code for.
        import timm

        image = content["model_cfg"]["vision_cfg"].get("timm_model_name")
        text = content["model_cfg"]["text_cfg"].get("hf_model_name")
        if image is not None and not timm.is_model(str(image)):
            raise ConfigError(f"{name}: vision_cfg.timm_model_name={image} is not a model of timm")
        if text is not None:
            with from_hub(str(text), f"{name}: text_cfg.hf_model_name={text} cannot be read from a folder or the hub"):
                require_own_code(str(text))
    preprocessing = content.get("preprocess_cfg") or {}
    if not isinstance(preprocessing, dict):
        raise ConfigError(f"{name}: its preprocess_cfg is {shortened(preprocessing)}, not a mapping")
    interpolation, mode = resizing(preprocessing, name)
    triples: list[Triple] = []
    for key, default in (("mean", OPENAI_DATASET_MEAN), ("std", OPENAI_DATASET_STD)):
        values = preprocessing.get(key) or default
        with one_message(f"{name} has {values} as mean or std of the pixels, not three numbers"):
            red, green, blue = map(float, values)
        triples.append((red, green, blue))
    return Description(content["model_cfg"], triples[0], triples[1], interpolation, mode)


def resizing(preprocessing: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Return interpolation and `resize_mode` of open_clip's preprocessing; bicubic and the shortest side by default.

    Raises ConfigError for values that open_clip does not have, or borders that are not black.
    """
    interpolation = preprocessing.get("interpolation") or "bicubic"
    resize = preprocessing.get("resize_mode") or "shortest"
    if interpolation not in ("bicubic", "bilinear") or resize not in ("shortest", "squash", "longest"):
        raise ConfigError(f"{name}: its preprocess_cfg has interpolation={interpolation}, resize_mode={resize}; "
                          "supported are bicubic and bilinear, and shortest, squash and longest")  # fmt: skip
    if resize == "longest" and preprocessing.get("fill_color"):
        raise ConfigError(f"{name}: its preprocess_cfg has fill_color={preprocessing['fill_color']}, supported is 0")
    return interpolation, resize


def settings_of(kind: type[T], described: Mapping[str, Any], options: Mapping[str, Any], key: str) -> T:
    """Return the settings of a tower, overridden by the user's options. Raises ConfigError for an unknown option."""
    allowed = [field.name for field in fields(kind) if field.name in OPTIONS]  # type: ignore[arg-type]
    require_listed(options, allowed, f"{key}.options.", f"open_clip's {kind.__name__}")
    with one_message(f"{key}: the settings of this model are none of open_clip's {kind.__name__}"):
        return kind(**{**described, **options})


def projection_path(tower: Any) -> str | None:
    """Return the name of a tower's last linear map, a module or a matrix [w, d]; None if it ends without one."""
    from open_clip.hf_model import HFTextEncoder
    from open_clip.modified_resnet import ModifiedResNet
    from open_clip.timm_model import TimmModel

    if isinstance(tower, ModifiedResNet):
        return "attnpool.c_proj"
    if isinstance(tower, HFTextEncoder):
        return {nn.Linear: "proj", nn.Sequential: "proj.2"}.get(type(tower.proj))
    if isinstance(tower, TimmModel):
        for name, path in (("proj", "head.proj"), ("mlp", "head.mlp.fc2")):
            if hasattr(tower.head, name):
                return path
        path = f"trunk.{tower.trunk.pretrained_cfg['classifier']}"
        return path if isinstance(tower.get_submodule(path), nn.Linear) else None
    path = "proj" if hasattr(tower, "proj") else "text_projection"
    return None if getattr(tower, path) is None else path


def remove_projection(tower: Any) -> int:
    """Remove the last linear map of a tower and return the width of the features before it."""
    if (path := projection_path(tower)) is None:
        if (trunk := getattr(tower, "trunk", None)) is not None:
            return getattr(trunk, "head_hidden_size", None) or trunk.num_features
        return getattr(tower, "width", 0) or tower.output_dim
    parent, _, name = path.rpartition(".")
    owner = tower.get_submodule(parent)
    projection = getattr(owner, name)
    if isinstance(projection, nn.Linear):
        setattr(owner, name, nn.Identity())
        return projection.in_features
    setattr(owner, name, None)
    return projection.shape[0]
