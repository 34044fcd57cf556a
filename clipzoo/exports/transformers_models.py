"""Convert tensors and configurations of transformers' CLIPModel and SiglipModel to ours, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clipzoo.data.tokenizer import ClipTokenizer
from clipzoo.encoders.base import Tower
from clipzoo.encoders.open_clip import OpenClipText
from clipzoo.encoders.text import ClipTextTower
from clipzoo.errors import first_names
from clipzoo.exports.open_clip import is_identity
from clipzoo.loading import LoadedModel
from clipzoo.model import Model

VISION, TEXT = "vision_model", "text_model"
TIMM_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu"}
"""transformers' name -> timm's name."""
TIMM, WHOLE, OPEN_CLIP = "vit_base_patch16_siglip_224", "vit_so400m_patch14_siglip_384", "ViT-B-16-SigLIP"
"""Models whose sizes the options replace. WHOLE: for images whose side is not a multiple of the patch size."""
IMAGE_TRUNK, TEXT_TRUNK = "encoder.image_tower.trunk", "encoder.text_tower.trunk"
OPEN_CLIP_BLOCK = ("attn.in_proj_", "attn.out_proj", "ln_1", "ln_2", "mlp.c_fc", "mlp.c_proj")
TIMM_BLOCK = ("attn.qkv.", "attn.proj", "norm1", "norm2", "mlp.fc1", "mlp.fc2")
TRANSFORMERS_BLOCK = ("self_attn.out_proj", "layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2")
"""Modules of a residual attention block; the first two begin with the fused input projection of the attention."""
OF_HEAD = ("head.log_scale", "head.image_projection", "head.image_bias", "head.text_projection", "head.text_bias")
"""Tensors of the head; each format has its own place for them."""


class TransformersModel(ABC):
    """A class of transformers for two towers with a cosine head. processor: joins its tokenizer and image processor."""

    kind: str
    name: str
    processor: str

    @abstractmethod
    def ties(self, image_layers: int, text_layers: int) -> list[Tie]:
        """Return the ties of our model with this one, except scale and bias of the logits."""

    @abstractmethod
    def nodes(self, path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the nodes `encoder` and `head` for the config.json at `path`; none if our towers cannot hold it."""

    @abstractmethod
    def settings(self, model: LoadedModel, image: Any, text: Any) -> tuple[dict[str, Any], ...]:
        """Return settings of config.json given both trunks: of model and parts, of the image, and of the text model."""

    def config(self, model: LoadedModel) -> dict[str, Any]:
        """Return the content of config.json."""
        encoder: Any = model.encoder
        image, text = encoder.image_tower.trunk, encoder.text_tower.trunk
        shared, vision, tokens = self.settings(model, image, text)
        return {
            "architectures": [self.name], "model_type": self.kind, **shared,
            "vision_config": {
                "model_type": f"{self.kind}_vision_model", "image_size": encoder.image_size, **vision, **shared,
            },
            "text_config": {
                "model_type": f"{self.kind}_text_model", "max_position_embeddings": len(text.positional_embedding),
                "vocab_size": len(text.token_embedding.weight), "hidden_size": encoder.text_width,
                **open_clip_blocks(text), **tokens, **shared,
            },
        }  # fmt: skip

    @abstractmethod
    def kind_faults(self, model: LoadedModel, image: Any, text: Any) -> list[str]:
        """Return the reasons why this class cannot hold these trunks and the head's projections."""

    def faults(self, model: LoadedModel) -> list[str]:
        """Return the reasons why this class cannot represent a model of two towers with a cosine head."""
        # The trunks, or the towers that have none.
        image, text = (dict(tower.named_children()).get("trunk", tower) for tower in model.encoder.towers.values())
        if reasons := self.kind_faults(model, image, text):
            return reasons
        ties, state = self.ties(*layers_of(model)), model.state_dict()
        tied = [name for tie in ties for name in tie.ours]
        untied = sorted(name for name in state if name not in {*tied, *OF_HEAD})
        missing = [name for name in tied if name not in state and name not in OF_HEAD]
        for verb, names in (("has", untied), ("lacks", missing)):
            if names:
                reasons.append(f"it {verb} {first_names([name.removeprefix('encoder.') for name in names], most=2)}")
        return reasons


class ClipModel(TransformersModel):
    """CLIPModel: open_clip's vision transformer and causal text transformer."""

    kind, name, processor = "clip", "CLIPModel", "CLIPProcessor"

    def ties(self, image_layers: int, text_layers: int) -> list[Tie]:
        return [
            tie(f"{IMAGE_TRUNK}.class_embedding", f"{VISION}.embeddings.class_embedding"),
            tie(f"{IMAGE_TRUNK}.conv1.weight", f"{VISION}.embeddings.patch_embedding.weight"),
            tie(f"{IMAGE_TRUNK}.positional_embedding", f"{VISION}.embeddings.position_embedding.weight"),
            *with_kinds(f"{IMAGE_TRUNK}.ln_pre", f"{VISION}.pre_layrnorm"),
            *with_kinds(f"{IMAGE_TRUNK}.ln_post", f"{VISION}.post_layernorm"),
            *block_ties(f"{IMAGE_TRUNK}.transformer.resblocks", VISION, image_layers, OPEN_CLIP_BLOCK),
            *text_ties(text_layers),
            tie("head.image_projection", "visual_projection.weight", transposed=True),
            tie("head.text_projection", "text_projection.weight", transposed=True),
        ]

    def nodes(self, path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
        import transformers

        clip: Any = transformers.CLIPConfig.from_dict(dict(content))
        vision, text = clip.vision_config, clip.text_config
        fits = [part.hidden_act in ("gelu", "quick_gelu") for part in (vision, text)]
        fits += [part.intermediate_size == 4 * part.hidden_size for part in (vision, text)]
        if not all(fits) or vision.layer_norm_eps != 1e-5:  # that of open_clip
            return {}
        context = text.max_position_embeddings
        encoder = {
            "_target_": "clipzoo.encoders.towers.TwoTowers",
            "image_size": vision.image_size, "image_width": vision.hidden_size, "text_width": text.hidden_size,
            "context_length": context,
            "tokenizer": {"_target_": "clipzoo.data.tokenizer.ClipTokenizer", "context_length": context},
            "image_tower": {
                "_target_": "clipzoo.encoders.image.ClipViT", "image_size": vision.image_size,
                "patch_size": vision.patch_size, "width": vision.hidden_size, "layers": vision.num_hidden_layers,
                "heads": vision.num_attention_heads, "quick_gelu": vision.hidden_act == "quick_gelu",
            },
            "text_tower": {
                "_target_": "clipzoo.encoders.text.ClipTextTower", "context_length": context,
                "vocabulary": text.vocab_size, "width": text.hidden_size, "layers": text.num_hidden_layers,
                "heads": text.num_attention_heads, "quick_gelu": text.hidden_act == "quick_gelu",
                "distinct_pads": False, "end_token": ClipTokenizer.end_token, "norm_eps": text.layer_norm_eps,
            },
        }  # fmt: skip
        head = {
            "_target_": "clipzoo.heads.vector.ClipHead", "image_width": vision.hidden_size,
            "text_width": text.hidden_size, "embed_width": clip.projection_dim, "temperature": 0.07,
            "max_scale": 100.0, "learnable_temperature": True,
        }  # fmt: skip
        return {"encoder": encoder, "head": head}

    def settings(self, model: LoadedModel, image: Any, text: Any) -> tuple[dict[str, Any], ...]:
        text_tower: Any = model.encoder.towers["text"]
        # CLIPModel pools at the largest id if that of the end token is 2.
        end = text_tower.end_token if text_tower.end_token < len(text.token_embedding.weight) else 2
        tokens = {"bos_token_id": ClipTokenizer.start_token, "eos_token_id": end, "pad_token_id": 0}
        sizes = {"patch_size": image.conv1.kernel_size[0], "hidden_size": model.encoder.image_width}
        projected = {"projection_dim": model.head.get_parameter("image_projection").shape[1]}
        return projected, {**sizes, **open_clip_blocks(image)}, tokens

    def kind_faults(self, model: LoadedModel, image: Any, text: Any) -> list[str]:
        from open_clip.transformer import TextTransformer, VisionTransformer

        reasons, text_tower = [], model.encoder.towers["text"]
        if type(image) is not VisionTransformer:
            reasons.append(f"its image tower is {type(image).__name__}, not open_clip's VisionTransformer")
        elif image.attn_pool is not None:
            reasons.append("its image tower pools by attention")
        elif image.pool_type != "tok":
            reasons.append(f"its image tower pools by {image.pool_type}, not at the class token")
        else:
            reasons += trunk_faults("its image tower", image, image.transformer.resblocks[0].mlp.gelu)
        if not isinstance(text_tower, ClipTextTower | OpenClipText) or type(text) is not TextTransformer:
            reasons.append(f"its text tower is {type(text).__name__}, not open_clip's causal TextTransformer")
        elif isinstance(text_tower, ClipTextTower) and text_tower.first_pad is not None:
            reasons.append("encoder.text_tower.distinct_pads is true")
        elif text_tower.end_token is None or isinstance(text_tower, OpenClipText) and text_tower.needs_padding:
            reasons.append("its text tower is not causal, or does not pool at the end of text")
        else:
            reasons += trunk_faults("its text tower", text, text.transformer.resblocks[0].mlp.gelu)
        if {"image_bias", "text_bias"} & dict(model.head.named_parameters()).keys():
            reasons.append("head.bias is true")
        return reasons


class SiglipModel(TransformersModel):
    """SiglipModel: timm's vision transformer with attention pooling and no projection, and SigLIP's text tower.

    The text tower is open_clip's text transformer without a causal mask, pooled at the last position, and a linear
    layer with bias.
    """

    kind, name, processor = "siglip", "SiglipModel", "SiglipProcessor"

    def ties(self, image_layers: int, text_layers: int) -> list[Tie]:
        ours, theirs = f"{IMAGE_TRUNK}.attn_pool", f"{VISION}.head"
        return [
            *with_kinds(f"{IMAGE_TRUNK}.patch_embed.proj", f"{VISION}.embeddings.patch_embedding"),
            tie(f"{IMAGE_TRUNK}.pos_embed", f"{VISION}.embeddings.position_embedding.weight", leading=True),
            *with_kinds(f"{IMAGE_TRUNK}.norm", f"{VISION}.post_layernorm"),
            tie(f"{ours}.latent", f"{theirs}.probe"),
            *with_kinds(f"{ours}.proj", f"{theirs}.attention.out_proj"),
            *with_kinds(f"{ours}.norm", f"{theirs}.layernorm"),
            *with_kinds(f"{ours}.mlp.fc1", f"{theirs}.mlp.fc1"),
            *with_kinds(f"{ours}.mlp.fc2", f"{theirs}.mlp.fc2"),
            *(
                Tie({f"{ours}.q.{kind}": 1, f"{ours}.kv.{kind}": 2}, {f"{theirs}.attention.in_proj_{kind}": 3})
                for kind in ("weight", "bias")
            ),
            *block_ties(f"{IMAGE_TRUNK}.blocks", VISION, image_layers, TIMM_BLOCK),
            *text_ties(text_layers),
            tie("head.text_projection", f"{TEXT}.head.weight", transposed=True),
            tie("head.text_bias", f"{TEXT}.head.bias"),
        ]

    def nodes(self, path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
        import transformers

        siglip: Any = transformers.SiglipConfig.from_dict(dict(content))
        vision, text = siglip.vision_config, siglip.text_config
        # The layer norms of timm have this epsilon.
        fits = [vision.vision_use_head, vision.layer_norm_eps == 1e-6, vision.hidden_act in TIMM_ACTIVATIONS]
        if not all(fits) or text.hidden_act not in ("gelu", "gelu_pytorch_tanh"):
            return {}
        context, folder = text.max_position_embeddings, str(path.parent)
        encoder = {
            "_target_": "clipzoo.encoders.towers.Towers",
            "image_size": vision.image_size, "image_width": vision.hidden_size, "text_width": text.hidden_size,
            "context_length": context,
            "tokenizer": {
                "_target_": "clipzoo.encoders.huggingface.HuggingFaceTokenizer", "name": folder,
                "context_length": context,
            },
            "image": {
                "_target_": "clipzoo.encoders.image.TimmTower",
                "name": WHOLE if vision.image_size % vision.patch_size else TIMM,
                "image_size": vision.image_size, "pretrained": False,
                "options": {
                    "patch_size": vision.patch_size, "embed_dim": vision.hidden_size,
                    "depth": vision.num_hidden_layers, "num_heads": vision.num_attention_heads,
                    "mlp_ratio": _ratio(vision), "act_layer": TIMM_ACTIVATIONS[vision.hidden_act],
                },
            },
            "text": {
                "_target_": "clipzoo.encoders.open_clip.OpenClipText", "name": OPEN_CLIP, "context_length": context,
                "options": {
                    "vocab_size": text.vocab_size, "width": text.hidden_size, "heads": text.num_attention_heads,
                    "layers": text.num_hidden_layers, "mlp_ratio": _ratio(text),
                    "norm_kwargs": {"eps": text.layer_norm_eps},
                    "act_kwargs": {"approximate": "tanh"} if text.hidden_act == "gelu_pytorch_tanh" else None,
                },
            },
        }  # fmt: skip
        head = {
            "_target_": "clipzoo.heads.vector.ClipHead", "image_width": vision.hidden_size,
            "text_width": text.hidden_size, "embed_width": vision.hidden_size, "temperature": 0.1,
            "max_scale": 1000.0, "learnable_temperature": True, "bias": True, "image_projection": False,
        }  # fmt: skip
        return {"encoder": encoder, "head": head}

    def settings(self, model: LoadedModel, image: Any, text: Any) -> tuple[dict[str, Any], ...]:
        block, width = image.blocks[0], model.encoder.image_width
        vision = {
            "patch_size": image.patch_embed.patch_size[0], "hidden_size": width,
            "num_hidden_layers": len(image.blocks), "num_attention_heads": block.attn.num_heads,
            "intermediate_size": block.mlp.fc1.out_features, "hidden_act": activation(block.mlp.act),
            "layer_norm_eps": epsilon(image), "attention_dropout": 0.0,
        }  # fmt: skip
        tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        return {}, vision, {"projection_size": width, **tokens}

    def kind_faults(self, model: LoadedModel, image: Any, text: Any) -> list[str]:
        from open_clip.transformer import TextTransformer
        from timm.layers import AttentionPoolLatent
        from timm.models.vision_transformer import Block, VisionTransformer

        reasons = []
        block: Any = next(iter(image.blocks), None) if type(image) is VisionTransformer else None
        if type(image) is not VisionTransformer or {type(one) for one in image.blocks} != {Block}:
            reasons.append(f"its image tower is {type(image).__name__}, not timm's VisionTransformer")
        elif not isinstance(pool := image.attn_pool, AttentionPoolLatent) or pool.latent_len != 1:
            reasons.append(f"its image tower pools by {image.global_pool}, not by attention with one query")
        elif len({*image.patch_embed.patch_size}) > 1 or pool.num_heads != block.attn.num_heads:
            reasons.append(
                "its image tower has oblong patches, or another number of heads in the pooling than in the blocks"
            )
        else:
            reasons += trunk_faults("its image tower", image, block.mlp.act)
        if type(text) is not TextTransformer:
            reasons.append(f"its text tower is {type(text).__name__}, not open_clip's TextTransformer")
        elif text.attn_mask is not None or text.pool_type != "last" or text.cls_emb is not None:
            reasons.append("its text tower is causal, or does not pool at the last position")
        else:
            reasons += trunk_faults("its text tower", text, text.transformer.resblocks[0].mlp.gelu)
        if not is_identity(model, "image"):
            reasons.append("head.image_projection is not the identity: train with +head.image_projection=false")
        return reasons


KINDS: dict[str, TransformersModel] = {model.kind: model for model in (ClipModel(), SiglipModel())}


@dataclass(frozen=True)
class Tie:
    """Tensors with the same values: ours, concatenated along the first dimension, equal theirs, concatenated.

    ours, theirs: name -> number of equal parts of the joined tensor. transposed: our tensor is theirs, transposed.
    leading: our tensor has an additional first dimension, of size 1. Both are for single tensors.
    """

    ours: Mapping[str, int]
    theirs: Mapping[str, int]
    transposed: bool = False
    leading: bool = False


def tie(ours: str, theirs: str, transposed: bool = False, leading: bool = False) -> Tie:
    return Tie({ours: 1}, {theirs: 1}, transposed, leading)


def with_kinds(ours: str, theirs: str) -> Iterator[Tie]:
    """Yield the ties of weight and bias of two modules."""
    for kind in ("weight", "bias"):
        yield tie(f"{ours}.{kind}", f"{theirs}.{kind}")


def layers_of(model: Model) -> tuple[int, int]:
    """Return the numbers of blocks of the image tower and of the text tower."""
    image, text = (len(tower.layers()) for tower in model.encoder.towers.values() if isinstance(tower, Tower))
    return image, text


def converted(ties: list[Tie], state: Mapping[str, Tensor], to_ours: bool) -> dict[str, Tensor]:
    """Return transformers' tensors under our names, or ours under theirs. Raises KeyError if one is missing."""
    named: dict[str, Tensor] = {}
    for entry in ties:
        sources, targets = (entry.theirs, entry.ours) if to_ours else (entry.ours, entry.theirs)
        tensors = [state[name] for name in sources]
        if entry.transposed:
            tensors = [tensor.mT for tensor in tensors]
        elif entry.leading:
            tensors = [tensor[None] if to_ours else tensor[0] for tensor in tensors]
        if len(sources) > 1 or len(targets) > 1:
            joined = torch.cat(tensors)
            unit = len(joined) // sum(targets.values())
            tensors = list(joined.split([unit * count for count in targets.values()]))
        named |= zip(targets, tensors, strict=True)
    return named


def text_ties(layers: int) -> list[Tie]:
    """Return the ties of open_clip's TextTransformer with CLIPTextModel and SiglipTextModel."""
    return [
        tie(f"{TEXT_TRUNK}.token_embedding.weight", f"{TEXT}.embeddings.token_embedding.weight"),
        tie(f"{TEXT_TRUNK}.positional_embedding", f"{TEXT}.embeddings.position_embedding.weight"),
        *with_kinds(f"{TEXT_TRUNK}.ln_final", f"{TEXT}.final_layer_norm"),
        *block_ties(f"{TEXT_TRUNK}.transformer.resblocks", TEXT, layers, OPEN_CLIP_BLOCK),
    ]


def block_ties(blocks: str, side: str, layers: int, names: tuple[str, ...]) -> Iterator[Tie]:
    """Yield the ties of the residual attention blocks of a trunk. names: tensors and modules in a block."""
    for layer in range(layers):
        ours, theirs = f"{blocks}.{layer}", f"{side}.encoder.layers.{layer}"
        fused, *modules = names
        for kind in ("weight", "bias"):
            parts = {f"{theirs}.self_attn.{letter}_proj.{kind}": 1 for letter in "qkv"}
            yield Tie({f"{ours}.{fused}{kind}": 3}, parts)
        for name, other in zip(modules, TRANSFORMERS_BLOCK, strict=True):
            yield from with_kinds(f"{ours}.{name}", f"{theirs}.{other}")


def epsilon(trunk: nn.Module) -> float | None:
    """Return the epsilon of the layer norms; None if they have several."""
    epsilons = {module.eps for module in trunk.modules() if isinstance(module, nn.LayerNorm)}
    return epsilons.pop() if len(epsilons) == 1 else None


def activation(module: nn.Module) -> str | None:
    """Return transformers' name of an activation, None if it has none."""
    names = {"QuickGELU": "quick_gelu", "GELUTanh": "gelu_pytorch_tanh", "ReLU": "relu"}
    if isinstance(module, nn.GELU):
        return "gelu_pytorch_tanh" if module.approximate == "tanh" else "gelu"
    return names.get(type(module).__name__)


def trunk_faults(what: str, trunk: nn.Module, act: nn.Module) -> list[str]:
    """Return the reasons why one epsilon and one named activation do not describe a trunk."""
    reasons = []
    if epsilon(trunk) is None:
        reasons.append(f"the layer norms of {what} have several epsilons")
    if activation(act) is None:
        reasons.append(f"the activation of {what} is {type(act).__name__}")
    return reasons


def open_clip_blocks(trunk: Any) -> dict[str, Any]:
    """Return the settings of open_clip's transformer as transformers' configuration names them."""
    block = trunk.transformer.resblocks[0]
    return {
        "num_hidden_layers": len(trunk.transformer.resblocks), "num_attention_heads": block.attn.num_heads,
        "intermediate_size": block.mlp.c_fc.out_features, "hidden_act": activation(block.mlp.gelu),
        "layer_norm_eps": epsilon(trunk), "attention_dropout": 0.0,
    }  # fmt: skip


def _ratio(part: Any) -> float:
    """Return r such that int(r hidden_size) is intermediate_size."""
    width, inner = part.hidden_size, part.intermediate_size
    ratio: float = inner / width
    return ratio if int(ratio * width) == inner else (inner + 0.5) / width
