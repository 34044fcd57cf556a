"""Text models of transformers as text towers, their tokenizers, and models of both views. Needs the extra `hf`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from clipzoo.config.trust import values_of
from clipzoo.encoders.base import Encoder, TextTower, longest_list, on_meta, recompute_blocks, require_as_large
from clipzoo.encoders.text import end_positions
from clipzoo.encoders.towers import TwoTowers
from clipzoo.errors import ConfigError, imported, nearest, number_of, one_message
from clipzoo.io import MB, read_json
from clipzoo.io.weights import from_hub, read_tensors
from clipzoo.types import Count, Features, NonNegativeCount, Part, Probability, Range, Scale, Side, as_captions, checked

LONGEST = 512
"""Largest default number of tokens: captions are short, and every row is stored at full length."""
CLIP_TOKENIZER = "clipzoo.data.tokenizer.ClipTokenizer"


@checked
class HuggingFaceText(TextTower):
    """A text model of transformers' AutoModel. Tokens: all positions of its last hidden state.

    Padding is masked and changes no feature. Of an encoder-decoder (T5) the encoder is used, of an image-text model
    (CLIP) its text model, without projections.

    name: a name on the hub, a folder, or a kind of model ("bert", "modernbert") with the settings of `options`.
    options: settings of the model's configuration (num_hidden_layers, attention_dropout, ...).
    tokenizer: a name on the hub or a folder; "clip" for CLIP's; None for that of `name`.
    pooling: "first" token, "mean" over the caption, or its "end" token; "auto": the first for masked
        language models (BERT), the mean for encoder-decoders (T5), else the end token (CLIP, causal models).
    context_length: number of tokens; None for the model's, at most 512. end_token: id; None for the tokenizer's.
    checkpoint: recompute activations in the backward pass; a number: of every k-th block only.
    pretrained: a name on the hub or a folder, whose configuration and weights replace those of `name`.
    """

    trunk: Any
    left_out = ("pooler", "decoder")

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        tokenizer: str | None = None,
        pooling: Literal["auto", "first", "mean", "end"] = "auto",
        context_length: Count | None = None,
        end_token: NonNegativeCount | None = None,
        checkpoint: bool | Count = False,
        pretrained: str | None = None,
    ) -> None:
        super().__init__()
        require_transformers("a text tower of transformers")
        from transformers import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

        name = pretrained or name
        with one_message(f"encoder.text.name={name}, options={options}: transformers cannot build this model"):
            config, self.trunk = _built(name, options)
        if pretrained is not None:
            with from_hub(pretrained, f"encoder.text_tower.pretrained={pretrained} cannot be loaded"):
                state, stored_state = self.trunk.state_dict(), pretrained_model(pretrained)[0].state_dict()
                self.trunk.load_state_dict({key: value for key, value in stored_state.items() if key in state})
        config.use_cache = False  # a block that runs again would add its keys again
        recompute_blocks(self.layers(), checkpoint)
        self.name, self.width, self.vocabulary = name, config.hidden_size, config.vocab_size
        self.description = f"transformers' {name}"

        limit = number_of_positions(self.trunk, self.trunk.config)
        if context_length is not None and limit is not None and context_length > limit:
            raise ConfigError(
                f"encoder.context_length={context_length}: {name} has positions for {number_of(limit, 'token')}"
            )
        self.context_length = context_length or min(limit or LONGEST, LONGEST)
        if pooling == "auto" and (config.is_encoder_decoder or config.model_type in ("t5", "mt5", "umt5")):
            pooling = "mean"
        elif pooling == "auto":
            pooling = "first" if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES else "end"
        self.pooling = pooling
        if tokenizer is None and name in CONFIG_MAPPING and not Path(name).exists():
            raise ConfigError(
                f"encoder.text.name={name} is a kind of model without a tokenizer: give encoder.text.tokenizer=FOLDER, "
                "the name of one on the Hugging Face hub, or clip"
            )
        self.tokenizer = {"_target_": CLIP_TOKENIZER, "context_length": self.context_length}
        if tokenizer != "clip":
            target = f"{HuggingFaceTokenizer.__module__}.{HuggingFaceTokenizer.__name__}"
            self.tokenizer = {"_target_": target, "name": tokenizer or name, "context_length": self.context_length}
        self.end_token = end_token
        self._padding: int = getattr(config, "pad_token_id", None) or 0

    def forward(self, text: Tensor) -> Features:
        if self.end_token is None:
            self.end_token = self.find_end_token(None)
        ends = end_positions(text, self.end_token)
        mask = torch.arange(text.shape[1], device=text.device) <= ends[:, None]  # [b, L]
        output = self.trunk(input_ids=text.where(mask, self._padding), attention_mask=mask.long())
        tokens = output.last_hidden_state
        if self.pooling == "first":
            return Features(tokens[:, 0], tokens, mask)
        if self.pooling == "end":
            return Features(tokens[torch.arange(len(text), device=text.device), ends], tokens, mask)
        weights = mask.to(tokens.dtype).unsqueeze(-1)
        return Features((tokens * weights).sum(dim=1) / weights.sum(dim=1), tokens, mask)

    def layers(self) -> list[nn.Module]:
        return longest_list(self.trunk, nn.ModuleList)

    def find_end_token(self, tokenizer: Any) -> int:
        if tokenizer is None and self.tokenizer["_target_"] != CLIP_TOKENIZER:
            tokenizer = HuggingFaceTokenizer(self.tokenizer["name"], self.context_length)
        end, ids = (49407, 49408) if tokenizer is None else (tokenizer.end_token, getattr(tokenizer, "vocabulary", 0))
        if ids > self.vocabulary:
            raise ConfigError(
                f"the tokenizer has {number_of(ids, 'token')}, {self.name} embeds {self.vocabulary}: give another "
                f"encoder.text.tokenizer, or encoder.text.options={{vocab_size: {ids}}}"
            )
        return end


class HuggingFaceTokenizer(Part):
    """Captions -> int64 [n, context_length]; a caption that is too long keeps its first tokens and its end token.

    Control tokens in a caption, such as "[SEP]", are plain text. The tokenizer is loaded on first use.

    name: a name on the hub, or a folder. context_length: maximum number of tokens of a caption.
    clean: cleaning of text as in open_clip; "none" leaves captions unchanged.
    strip_end: replace the end token by 0, as CLIPA's models are trained.
    """

    def __init__(
        self,
        name: str,
        context_length: Annotated[int, Range(at_least=3)],
        clean: Literal["none", "whitespace", "lower", "canonicalize"] = "none",
        strip_end: bool = False,
    ) -> None:
        self.name, self.context_length, self.clean, self.strip_end = name, context_length, clean, strip_end

    @cached_property
    def source(self) -> Any:
        transformers = require_transformers("encoder.tokenizer")
        with from_hub(
            self.name,
            f"encoder.tokenizer.name={self.name} is not a folder with a tokenizer, and cannot be loaded from the "
            "Hugging Face hub",
        ):
            source = transformers.AutoTokenizer.from_pretrained(
                self.name, split_special_tokens=True, trust_remote_code=False
            )
        if source.sep_token_id is None and source.eos_token_id is None:
            raise ConfigError(f"the tokenizer {self.name} has no token that ends a text: choose another")
        return source

    @cached_property
    def ends_itself(self) -> bool:
        """True if the tokenizer of transformers adds the end token."""
        return self.source("")["input_ids"][-1:] in ([self.source.sep_token_id], [self.source.eos_token_id])

    @cached_property
    def _end(self) -> int:
        if self.ends_itself:
            return self.source("")["input_ids"][-1]
        separator, end = self.source.sep_token_id, self.source.eos_token_id
        return end or (end if separator is None else separator)

    @property
    def pad_token(self) -> int:
        return self._end if self.source.pad_token_id is None else self.source.pad_token_id

    @property
    def end_token(self) -> int:
        """Id that ends a caption; all positions after its first occurrence are padding."""
        return 0 if self.strip_end else self._end

    @property
    def vocabulary(self) -> int:
        return len(self.source)

    def pieces(self, ids: list[int]) -> list[str]:
        return [self.source.decode([token]) for token in ids]

    def __call__(self, captions: str | Sequence[str]) -> Tensor:
        captions = as_captions(captions)
        if self.clean != "none":
            from open_clip.tokenizer import get_clean_fn

            captions = list(map(get_clean_fn(self.clean), captions))
        length = self.context_length - (not self.ends_itself)
        rows = self.source(captions, truncation=True, max_length=length)["input_ids"]
        ids = torch.full((len(rows), self.context_length), self.pad_token, dtype=torch.int64)
        for target, row in zip(ids, rows, strict=True):
            ids_with_end = row if self.ends_itself else [*row, self._end]
            target[: len(ids_with_end)] = torch.tensor(ids_with_end)
        return torch.where(ids == self._end, 0, ids) if self.strip_end else ids

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.context_length, self.clean, self.strip_end)


class DistilBertTokenizer(HuggingFaceTokenizer):
    """Captions -> int64 [n, context_length], [CLS] words [SEP] and padding of zeros.

    vocabulary: 0, which fits every tower: a run is built before its tokenizer is loaded.
    """

    end_token = 102  # type: ignore[assignment]
    vocabulary = 0  # type: ignore[assignment]


def require_transformers(what: str) -> Any:
    """Return the package transformers. what: the part that needs it, for the message of the ConfigError if missing."""
    return imported("transformers", f"{what} needs", "hf")


PROJECTIONS = {"image": "visual_projection", "text": "text_projection"}
OF_HEAD = ("logit_scale", "logit_bias", "temperature")
"""Last linear maps and parameters of models of transformers, which belong to the head."""


@checked
class HuggingFaceModel(TwoTowers):
    """A model of transformers that embeds images and text, such as ALIGN, without its last linear maps and its scale.

    settings: its config.json. image_width, text_width: widths of the features. image_size: side of the images, whose
    central square of side `crop` the model takes. context_length, tokenizer, mean, std: as in `TwoTowers`.
    has_mask: True if the model takes a mask of padding; False if features depend on padding.
    """

    trunk: Any
    relations = {"tokenizer.context_length == context_length": "both must be the same"}

    def __init__(
        self, settings: dict[str, Any], image_width: Count, text_width: Count, image_size: Side, crop: Side,
        context_length: Count, tokenizer: Callable[[list[str]], Tensor], has_mask: bool,
        mean: tuple[Probability, Probability, Probability], std: tuple[Scale, Scale, Scale],
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        auto, config = require_transformers("this encoder").AutoModel, stored_configuration(Path("encoder"), settings)
        self.trunk = auto.from_config(config, trust_remote_code=False)
        for name, module in self.trunk.named_children():
            if name in PROJECTIONS.values() and isinstance(module, nn.Linear):
                setattr(self.trunk, name, nn.Identity())
        for name in [name for name, _ in self.trunk.named_parameters(recurse=False) if name in OF_HEAD]:
            delattr(self.trunk, name)
        self.image_width, self.text_width, self.image_size, self.crop = image_width, text_width, image_size, crop
        self.context_length, self.tokenizer, self.needs_padding = context_length, tokenizer, not has_mask
        self._set_normalisation(mean, std)

    def pixels(self, image: Tensor) -> dict[str, Tensor]:
        """[b, 3, S, S] uint8 -> the model's argument: normalised central squares."""
        start = (self.image_size - self.crop) // 2
        return {"pixel_values": self.normalised(image[..., start : start + self.crop, start : start + self.crop])}

    def tokens(self, text: Tensor) -> dict[str, Tensor]:
        """[b, L] int64 -> the model's arguments: ids, and the mask of padding."""
        if self.needs_padding:
            return {"input_ids": text}
        ends = end_positions(text, self.tokenizer.end_token)  # type: ignore[attr-defined]
        mask = torch.arange(text.shape[1], device=text.device) <= ends[:, None]  # [b, L]
        return {"input_ids": text, "attention_mask": mask.long()}

    def image(self, image: Tensor) -> Features:
        output = self.trunk.get_image_features(**self.pixels(image))
        # A tensor before transformers 5.
        return Features(getattr(output, "pooler_output", output))

    def text(self, text: Tensor) -> Features:
        output = self.trunk.get_text_features(**self.tokens(text))
        return Features(getattr(output, "pooler_output", output))

    pooled_image, pooled_text = Encoder.pooled_image, Encoder.pooled_text


def number_of_positions(model: nn.Module, config: Any) -> int | None:
    """Return the longest text of a model; RoBERTa and related models count positions from the padding id + 1."""
    limit = getattr(config, "max_position_embeddings", None)
    tables = [module for name, module in model.named_modules() if name.endswith("embeddings.position_embeddings")]
    padding = next((table.padding_idx for table in tables if isinstance(table, nn.Embedding)), None)
    return limit if limit is None or padding is None else limit - padding - 1


def _built(name: str, options: dict[str, Any]) -> tuple[Any, nn.Module]:
    """Return a configuration, and its text encoder with initial weights, without pooling layer or decoder."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_TEXT_ENCODING_MAPPING, MODEL_MAPPING, AutoConfig

    if name in CONFIG_MAPPING and not Path(name).exists():
        config = AutoConfig.for_model(name)
    else:
        unknown = (
            f"encoder.text.name={name}: there is no folder {name} with a config.json, transformers has no such kind of "
            f"model{nearest(name, list(CONFIG_MAPPING), most=3)}, and the Hugging Face hub does not give it"
        )
        with from_hub(name, unknown):
            config = stored_configuration(stored_folder(name, ["config.json"]))
        getattr(config, "text_config", config).name_or_path = name  # for init.text=huggingface
    config = getattr(config, "text_config", config)
    allowed = _own_settings(config)
    for key, value in options.items():
        if key not in allowed or not isinstance(value, bool | int | float | str | None) or "/" in str(value):
            raise ConfigError(f"encoder.text.options.{key}={value}: {type(config).__name__} has no such option"
                              f"{nearest(key, allowed, most=3)}")  # fmt: skip
        setattr(config, key, value)
    if getattr(config, "vocab_size", None) is None or getattr(config, "hidden_size", None) is None:
        raise ConfigError(f"encoder.text.name={name}: a model of type {config.model_type} reads no text")
    if getattr(config, "pad_token_id", None) is not None and config.pad_token_id >= config.vocab_size:
        config.pad_token_id = 0

    mappings = (MODEL_FOR_TEXT_ENCODING_MAPPING, MODEL_MAPPING) if config.is_encoder_decoder else (MODEL_MAPPING,)
    kind: Any = next((mapping[type(config)] for mapping in mappings if type(config) in mapping), None)
    if kind is None:
        raise ConfigError(f"encoder.text.name: transformers has no model for {type(config).__name__}")
    kind = kind[0] if isinstance(kind, tuple | list) else kind
    without_pooler = "add_pooling_layer" in inspect.signature(kind).parameters
    model = kind(config, add_pooling_layer=False) if without_pooler else kind(config)
    # An encoder-decoder such as BART gives its encoder.
    has_decoder = config.is_encoder_decoder and hasattr(model, "decoder")
    return config, model.get_encoder() if has_decoder else model


def stored_configuration(folder: Path, content: Mapping[str, Any] | None = None) -> Any:
    """Return a folder's configuration of transformers with the settings of the model's own class only: not kernels,
    quantization and code that transformers would fetch. content: of config.json; None to read it. Raises ConfigError.
    """
    from transformers import CONFIG_MAPPING

    path = folder / "config.json"
    content = read_json(path, MB) if content is None else content
    if content.get("model_type") not in CONFIG_MAPPING:
        raise ConfigError(f"{path}: transformers has no model_type {content.get('model_type')}; no code is imported")
    return _listed(CONFIG_MAPPING[content["model_type"]].from_dict(dict(content)))


def require_own_code(name: str) -> None:
    """Raise ConfigError unless other libraries build the model of this name with transformers' own code.

    These libraries read config.json themselves: settings that fetch code are refused, not left out.
    """
    folder = stored_folder(name, ["config.json"])
    stored_configuration(folder)
    for key, value in values_of(read_json(folder / "config.json", MB)):
        if "implementation" in key and value not in (None, "eager", "sdpa"):
            raise ConfigError(f"{folder / 'config.json'}: {key}={value} names code: remove the entry")


def _listed(config: Any) -> Any:
    """Return a configuration, and those inside it, with `_own_settings` only."""
    settings = {key: value for key, value in vars(config).items() if key in _own_settings(config)}
    inner = {key: _listed(value).to_dict() for key, value in settings.items() if hasattr(value, "model_type")}
    return type(config)(**{**settings, **inner})


def _own_settings(config: Any) -> list[str]:
    """Return the names of the settings that the class of a configuration declares, and the ids of special tokens."""
    from transformers import PretrainedConfig

    general, own = (inspect.signature(kind).parameters for kind in (PretrainedConfig, type(config)))
    shared = {"pad_token_id", "bos_token_id", "eos_token_id", "is_decoder", "is_encoder_decoder", "tie_word_embeddings"}
    return sorted(key for key in {*own, *shared} - ({*general, "kwargs"} - shared) if hasattr(config, key))


def stored_folder(name: str, patterns: list[str]) -> Path:
    """Return a folder, or that in the hub's cache with the files of OWNER/MODEL or OWNER/MODEL@REVISION."""
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    if Path(name).is_dir():
        return Path(name)
    return Path(snapshot_download(repository, revision=revision or None, allow_patterns=patterns))


def pretrained_model(name: str) -> tuple[nn.Module, set[str]]:
    """Return a model of transformers with its weights, and the names of random tensors, which its files lack.

    name: a folder, or a name on the hub. Weights are read only from .safetensors files. Call within `from_hub`.
    Raises ConfigError if the folder has none, or its configuration describes a larger model than they hold.
    """
    from transformers import AutoModel

    folder = stored_folder(name, ["config.json", "*.safetensors", "*.safetensors.index.json"])
    config = stored_configuration(folder)
    stored = [value for file in sorted(folder.glob("*.safetensors")) for value in read_tensors(file).values()]
    with on_meta(len(stored)):
        empty_model = AutoModel.from_config(config, trust_remote_code=False)
    require_as_large(empty_model, stored, folder)
    if torch.get_default_device().type == "meta":
        return empty_model, set()
    model, info = AutoModel.from_pretrained(
        folder, config=config, use_safetensors=True, trust_remote_code=False, output_loading_info=True
    )
    return model.float(), set(info["missing_keys"])
