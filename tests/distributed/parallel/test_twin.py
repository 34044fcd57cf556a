"""A twin has modules of its own and the tensors of its model."""

from __future__ import annotations

import torch
from torch import nn

from clipzoo.distributed.parallel import by_kind
from clipzoo.distributed.sharded import twin
from clipzoo.encoders.base import call_as_forward
from clipzoo.encoders.tuning import LowRank


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
