"""ONNX graphs, for onnxruntime and every other runtime of that format."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch.onnx

from clipzoo.api.formats.graphs import Graph, graphs
from clipzoo.errors import TrainingError
from clipzoo.io import below
from clipzoo.model import Model

OPSET = 20
TOLERANCE = 1e-3
"""Relative and absolute; larger than any rounding error of float32 seen."""


def write_onnx(model: Model, folder: Path) -> None:
    """Write image.onnx, text.onnx and score.onnx, and run each once. Weights beyond 2 GB lie in *.onnx.data.

    Raises:
        TrainingError: onnxruntime computes other values than torch.
    """
    for graph in graphs(model):
        with warnings.catch_warnings():
            # torch warns that inputs of equal length share one name.
            warnings.filterwarnings("ignore", ".*axis name.*")
            program = torch.onnx.export(
                graph.program(),
                input_names=list(graph.inputs),
                output_names=list(graph.outputs),
                dynamic_shapes=(tuple({0: graph.rows[name]} for name in graph.inputs),),
                opset_version=OPSET,
                verbose=False,
            )
        assert program is not None
        path = below(folder, f"{graph.name}.onnx")
        program.save(path)
        _check(graph, path)


def _check(graph: Graph, path: Path) -> None:
    """Raise TrainingError unless onnxruntime computes the outputs of torch."""
    from onnxruntime import InferenceSession

    session = InferenceSession(path, providers=["CPUExecutionProvider"])
    results = session.run(None, {name: tensor.cpu().numpy() for name, tensor in graph.inputs.items()})
    with torch.no_grad():
        expected = graph.module(*graph.inputs.values())
    for name, result, tensor in zip(graph.outputs, results, expected, strict=True):
        if not torch.allclose(torch.from_numpy(result), tensor.cpu(), rtol=TOLERANCE, atol=TOLERANCE):
            raise TrainingError(f"{path}: onnxruntime's {name} differs from torch's by more than {TOLERANCE}")
