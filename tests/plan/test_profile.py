"""Parameters and FLOPs of open_clip's architectures, against the table that its authors publish."""

from __future__ import annotations

import csv
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from clipzoo.build import build_model, found_in_model, parameters_of
from clipzoo.config.compose import compose
from clipzoo.config.schema import filled
from clipzoo.encoders.open_clip import FILE
from clipzoo.plan.counts import batch_of, count
from tests.support.open_clip_models import HUGGING_FACE

TABLE = Path(__file__).parent / "open_clip" / "model_profile.csv"
"""docs/model_profile.csv of mlfoundations/open_clip, commit 89fb801."""
ROWS = {row["model"]: row for row in csv.DictReader(TABLE.open())}
HALF_A_DIGIT = 0.005001
"""Rounding of the table, in millions of parameters and in GFLOP."""
FULL_SIZE: dict[str, dict[str, Any]] = {
    "roberta-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
                     "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1},
    "xlm-roberta-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
                         "intermediate_size": 3072, "vocab_size": 250002, "max_position_embeddings": 514,
                         "type_vocab_size": 1},
    "xlm-roberta-large": {"type_vocab_size": 1},
    "google/mt5-base": {"d_model": 768, "num_layers": 12, "num_heads": 12, "d_kv": 64, "d_ff": 2048,
                        "vocab_size": 250112},
    "facebook/nllb-200-distilled-600M": {"d_model": 1024, "encoder_layers": 12, "decoder_layers": 12,
                                         "encoder_attention_heads": 16, "decoder_attention_heads": 16,
                                         "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "vocab_size": 256206},
}  # fmt: skip
"""Sizes of the models of transformers, whose configurations open_clip downloads."""
LONGEST_TEXT = {"roberta-base": 514, "xlm-roberta-base": 514, "xlm-roberta-large": 514,
                "facebook/nllb-200-distilled-600M": 1024, "facebook/nllb-200-distilled-1.3B": 1024}  # fmt: skip
"""Tokens for which the table counts a text tower of transformers, all of its positions; CoCa's are its decoder's."""


def configured(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration of a training of the architecture, and open_clip's description of it."""
    described = deepcopy(open_clip.get_model_config(name))
    transformer = described["text_cfg"].get("hf_model_name")
    if transformer is not None:
        described["text_cfg"]["hf_model_name"] = str(folder)
        sizes = {**HUGGING_FACE[transformer], **FULL_SIZE.get(transformer, {})}
        (folder / "config.json").write_text(json.dumps(sizes))
        (folder / FILE).write_text(json.dumps({"model_cfg": described, "preprocess_cfg": {}}))
    place = f"local-dir:{folder}" if transformer is not None else name
    plain = compose(["encoder=open_clip", f"encoder.name={place}", "head=clip", "data.shards=none.tar"])
    return filled(plain, found_in_model(plain)), described


def profile(name: str, folder: Path) -> dict[str, float]:
    """Parameters and FLOPs of our model, with what open_clip counts and it does not have."""
    plain, described = configured(name, folder)
    image, text, width = described["vision_cfg"], described["text_cfg"], plain["encoder"]["image_width"]
    embed_width = described["embed_dim"]
    with torch.device("meta"):
        model = build_model(plain).eval()
        heads = dict(model.head.named_parameters())
        sizes, flops = {}, {}
        with FakeTensorMode(allow_non_fake_inputs=True):
            batch = batch_of(plain, 1, "meta")
            captions, transformer = batch.text, open_clip.get_model_config(name)["text_cfg"].get("hf_model_name")
            if transformer is not None:
                length = LONGEST_TEXT.get(transformer, captions.shape[1])
                captions = captions.new_zeros(1, described.get("multimodal_cfg", {}).get("context_length", length))
            for view, pixels_or_ids in (("image", batch.image), ("text", captions)):
                encode, embed = getattr(model.encoder, view), getattr(model.head, f"embed_{view}")
                with FlopCounterMode(display=False) as counter:
                    embed(encode(pixels_or_ids))
                flops[view] = counter.get_total_flops()
                tower = getattr(model.encoder, f"{view}_tower")
                sizes[view] = parameters_of(tower) + heads[f"{view}_projection"].numel()
    if isinstance(image.get("layers"), list):
        # open_clip's attention pooling of a ResNet computes all positions, ours the one that is used.
        others = (image["image_size"] // 32) ** 2
        flops["image"] += others * (2 * width**2 + 4 * (others + 1) * width + 2 * width * embed_width)
    if image.get("timm_proj") == "none":
        # SigLIP's image tower has no projection; `head=clip` trains one.
        sizes["image"] -= width**2
        flops["image"] -= 2 * width**2
    # Biases of last projections, which `head=clip` does not have unless head.bias=true.
    if image.get("timm_model_name") and not image.get("timm_proj"):
        sizes["image"] += embed_width
    if text.get("proj_bias"):
        sizes["text"] += embed_width
    counts = {f"{view}_mparams": sizes[view] / 1e6 for view in sizes}
    counts |= {f"{view}_gflops": flops[view] / 1e9 for view in flops}
    # CoCa's decoder is not in our model.
    is_whole = "multimodal_cfg" not in described
    return counts | ({"mparams": sum(sizes.values()) / 1e6, "gflops": sum(flops.values()) / 1e9} if is_whole else {})


def assert_as_published(name: str, folder: Path) -> None:
    counts = profile(name, folder)
    published = {key: float(ROWS[name][key]) for key in counts}
    assert counts == pytest.approx(published, rel=0, abs=HALF_A_DIGIT)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["RN50", "coca_ViT-B-32", "mt5-base-ViT-B-32"])
def test_parameters_and_flops_are_those_that_open_clip_publishes(name, tmp_path):
    assert_as_published(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_parameters_and_flops_of_all_architectures_are_those_that_open_clip_publishes(name, tmp_path):
    assert_as_published(name, tmp_path)


@pytest.mark.medium
def test_a_plan_counts_the_last_block_at_one_position_and_the_rest_as_published(tmp_path):
    name = "ViT-S-32-alt"
    plain, described = configured(name, tmp_path)
    counts = count(plain, 1000)
    assert (counts.encoder + counts.others) / 1e6 == pytest.approx(float(ROWS[name]["mparams"]), abs=HALF_A_DIGIT)
    left_out = 0
    for tokens, width in ((50, plain["encoder"]["image_width"]), (77, plain["encoder"]["text_width"])):
        # Queries, attention, output and perceptron of the other positions, and the projection, which the head counts.
        left_out += (tokens - 1) * (20 * width**2 + 4 * tokens * width) + 2 * width * described["embed_dim"]
    published = float(ROWS[name]["gflops"])
    assert (counts.forward_flops + left_out) / 1e9 == pytest.approx(published, abs=HALF_A_DIGIT)
    assert counts.step_flops == 3 * counts.forward_flops
