"""trainer.precision=fp8: torchao's linear layers in the passes of a step only, refused without device or package."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clipzoo.distributed.world import World
from clipzoo.encoders.image import TimmTower
from clipzoo.errors import ConfigError
from clipzoo.training import settings
from clipzoo.training.gradients import Float8Linears
from clipzoo.training.settings import Computation

PICTURES = {"depth": 2, "embed_dim": 32, "num_heads": 2}


def test_a_cpu_is_refused_by_name():
    with pytest.raises(
        ConfigError, match="fp8 needs a GPU of compute capability 8.9 .* is on the CPU: give trainer.precision"
    ):
        Computation(precision="fp8").resolved(None, World())


@pytest.mark.parametrize(
    ("capability", "message"),
    [
        ((8, 0), "this run is on A GPU: give trainer.precision=bf16"),
        ((9, 0), "trainer.precision=fp8 needs torchao: pip install"),
    ],
)
def test_an_older_gpu_and_a_missing_package_are_refused_by_name(monkeypatch, capability, message):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=message):
        Computation(precision="fp8").resolved(None, World(device=torch.device("cuda")))


def test_weights_divided_among_ranks_are_refused():
    with pytest.raises(ConfigError, match="share whole weights: give trainer.parallel=ddp"):
        Computation(precision="fp8", parallel="fsdp")


def test_products_are_rounded_to_float8_in_the_passes_of_a_step_and_exact_outside():
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    tower = TimmTower("vit_tiny_patch16_224", 32, False, PICTURES, checkpoint=2).train()
    image, names = torch.randn(4, 3, 32, 32), list(tower.state_dict())
    exact = tower.pooled(image)
    gradients = torch.autograd.grad(exact.square().sum(), list(tower.parameters()))
    float8 = Float8Linears(tower, emulate=True)
    assert len(float8.layers) == 2 * 4, "qkv, proj, fc1 and fc2 of two blocks"
    with float8.active():
        assert list(tower.state_dict()) == names
        rounded = tower.pooled(image)
        others = torch.autograd.grad(rounded.square().sum(), list(tower.parameters()))
    for value, expected in ((rounded, exact), *zip(others, gradients, strict=True)):
        assert not torch.equal(value, expected)
        difference = (value - expected).norm() / expected.norm()
        assert difference < 0.15, "3 bits of mantissa round by up to 1/16"
    assert torch.equal(tower.pooled(image), exact)
    assert all(
        type(module) is nn.Linear for module in tower.trunk.blocks[0].mlp.children() if hasattr(module, "weight")
    )
