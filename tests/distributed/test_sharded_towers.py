"""Every kind of tower computes the gradients of one rank when ranks divide its blocks; twins share their tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from clipzoo.build import build_head, build_objective
from clipzoo.distributed.parallel import Parallel, by_kind
from clipzoo.distributed.sharded import Sharded, twin
from clipzoo.distributed.world import World
from clipzoo.encoders.base import Encoder, call_as_forward
from clipzoo.encoders.demo import DemoImageTower
from clipzoo.encoders.huggingface import HuggingFaceText
from clipzoo.encoders.image import ClipResNet, ClipViT, TimmTower
from clipzoo.encoders.open_clip import OpenClipImage, OpenClipText
from clipzoo.encoders.text import ClipTextTower
from clipzoo.encoders.tuning import Lora, LowRank
from clipzoo.model import Model
from clipzoo.training.gradients import GradientCache
from clipzoo.types import Batch, Features, Progress
from scripts.compatibility import composed
from tests.support.ranks import run_ranks

SIDE, LENGTH, BATCH = 32, 16, 4
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 99,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 16, "num_heads": 2, "d_ff": 64, "num_layers": 2, "vocab_size": 99, "dropout_rate": 0.0}
OPEN_CLIP_TEXT = {"width": 32, "heads": 2, "layers": 2, "vocab_size": 99, "context_length": LENGTH}
OPEN_CLIP_IMAGE = {"width": 32, "head_width": 16, "layers": 2, "patch_size": 16, "image_size": SIDE}
VIT, CONVNEXT = {"depth": 2, "embed_dim": 32, "num_heads": 2}, {"depths": [1, 1, 1, 1], "dims": [8, 8, 16, 16]}
Kind = Callable[[], nn.Module]
IMAGES: dict[str, Kind] = {
    "clip": lambda: ClipViT(SIDE, 16, 32, 2, 2, False),
    "clip, recomputed": lambda: ClipViT(SIDE, 16, 32, 2, 2, False, checkpoint=True),
    "clip's resnet, recomputed": lambda: ClipResNet(SIDE, (1, 1, 1, 1), 4, 2, checkpoint=True),
    "timm's vit with layer scale": lambda: TimmTower("vit_tiny_patch16_224", SIDE, False, {**VIT, "init_values": 0.1}),
    "timm's convnext": lambda: TimmTower("convnext_atto", None, False, CONVNEXT),
    "demo": lambda: DemoImageTower(SIDE, 32, 2),
    "open_clip": lambda: OpenClipImage("ViT-B-32", SIDE, OPEN_CLIP_IMAGE),
}
TEXTS: dict[str, Kind] = {
    "clip": lambda: ClipTextTower(LENGTH, 99, 32, 2, 2, False, False, 98, 1e-5),
    "clip, recomputed": lambda: ClipTextTower(LENGTH, 99, 32, 2, 2, False, False, 98, 1e-5, checkpoint=True),
    "open_clip": lambda: OpenClipText("ViT-B-32", None, OPEN_CLIP_TEXT),
    "transformers' BERT": lambda: HuggingFaceText("bert", BERT, tokenizer="clip", context_length=LENGTH, end_token=98),
    "transformers' T5": lambda: HuggingFaceText("t5", T5, tokenizer="clip", context_length=LENGTH, end_token=98),
    "clip, adapted": lambda: adapted(ClipTextTower(LENGTH, 99, 32, 2, 2, False, False, 98, 1e-5)),
    "clip, distinct pads": lambda: ClipTextTower(LENGTH, 99, 32, 2, 2, False, True, 98, 1e-5),
}


class Towers(Encoder):
    """Any two towers."""

    def __init__(self, image: nn.Module, text: nn.Module) -> None:
        super().__init__()
        self.image_tower, self.text_tower = image, text
        self.image_width, self.text_width = image.width, text.width

    def image(self, image: Tensor) -> Features:
        return self.image_tower(image)

    def text(self, text: Tensor) -> Features:
        return self.text_tower(text)

    def pooled_image(self, image: Tensor) -> Tensor:
        return self.image_tower.pooled(image)

    def pooled_text(self, text: Tensor) -> Tensor:
        return self.text_tower.pooled(text)


def adapted(tower: nn.Module) -> nn.Module:
    Lora(2, 4.0, None, 1.0, 1.0).apply(tower, "tune.text")
    for name, parameter in tower.named_parameters():
        if name.endswith("lora_B"):
            nn.init.normal_(parameter, std=0.1)
    return tower


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(BATCH, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
    text = torch.randint(1, 90, (BATCH, LENGTH), generator=generator)
    text[torch.arange(BATCH), torch.arange(BATCH) + 5] = 98
    return Batch(image, text, torch.arange(BATCH))


def computed(image: str, text: str, world: World, is_sharded: bool) -> dict[str, Tensor]:
    """Return loss and gradients of a batch in evaluation mode, where batch norm sees no batch, and the embeddings."""
    torch.manual_seed(0)
    encoder = Towers(IMAGES[image](), TEXTS[text]())
    head = composed("+head=clip", "+encoder={image_width:1,text_width:1}")
    head["head"] |= {"image_width": encoder.image_width, "text_width": encoder.text_width, "embed_width": 8}
    model = Model(encoder, build_head(head)).double().eval()
    parallel: Parallel[Model] = (
        Sharded(model, world, [model.head], world.size) if is_sharded else Parallel(model, world)
    )
    cache = GradientCache(model, build_objective(composed("+objective=infonce")), world, parallel=parallel)
    if "recomputed" in image + text:
        parallel.trained.train()
        for module in parallel.trained.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
    loss = cache(batch().split(BATCH // world.size)[world.rank], Progress(0, 5, BATCH, BATCH))
    values = {name: p.grad for name, p in parallel.trained.named_parameters() if p.grad is not None}
    values = {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in values.items()}
    with parallel.whole() as whole, torch.no_grad():
        values["embedding"] = whole.encode_text(batch().text)
        values |= {f"weight {name}": parameter.clone() for name, parameter in whole.named_parameters()}
    return {**values, "loss": world.mean(loss.total)}


def all_computed(images: list[str], texts: list[str]) -> list[dict[str, Tensor]]:
    world = World.from_process_group()
    return [computed(image, text, world, is_sharded=True) for image, text in zip(images, texts, strict=True)]


@pytest.mark.slow
def test_ranks_that_divide_the_blocks_of_any_tower_have_the_gradients_of_one():
    images, texts = list(IMAGES), list(TEXTS)
    for number, actual in enumerate(zip(*run_ranks(2, all_computed, images, texts), strict=True)):
        expected = computed(images[number], texts[number], World(), is_sharded=False)
        for rank in actual:
            assert rank.keys() == expected.keys(), (images[number], texts[number])
            for name, value in expected.items():
                # A bias before a norm has a gradient that is zero in theory.
                torch.testing.assert_close(rank[name], value, rtol=1e-9, atol=1e-12, msg=f"{images[number]}: {name}")


def test_a_twin_shares_every_tensor_and_the_kept_modules_and_no_other_module():
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "head": nn.Linear(4, 2)})
    nn.utils.parametrize.register_parametrization(model["encoder"][0], "weight", LowRank(torch.zeros(4, 4), 1, 1.0))
    other = twin(model, [model["head"]])
    states = (module.state_dict(keep_vars=True).values() for module in (model, other))
    for own, shared in zip(*states, strict=True):
        assert own is shared
    assert other["head"] is model["head"]
    assert not set(model["encoder"].modules()) & set(other["encoder"].modules())
    other["encoder"](torch.randn(3, 4))
    assert model["encoder"][1].num_batches_tracked == 1


def test_a_function_called_as_forward_runs_the_hooks_of_its_module():
    layer, calls = nn.Linear(3, 3), []
    inputs = torch.randn(2, 3)
    expected = call_as_forward(layer, lambda module, x: module.weight @ x.mT, inputs)
    layer.register_forward_pre_hook(lambda module, arguments: calls.append(len(arguments)))
    assert torch.equal(call_as_forward(layer, lambda module, x: module.weight @ x.mT, inputs), expected)
    assert calls == [1] and "forward" not in vars(layer)
    assert layer(inputs).shape == (2, 3)


def test_whole_tensors_are_of_one_kind():
    tensors = [torch.zeros(2), torch.ones(3)]
    assert by_kind(tensors) == [tensors] and by_kind([]) == []
