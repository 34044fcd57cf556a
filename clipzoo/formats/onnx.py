"""ONNX graphs, for onnxruntime and every other runtime of that format."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch.onnx

from clipzoo.errors import ConfigError
from clipzoo.formats.graphs import graphs
from clipzoo.model import Model

OPSET = 20


def write_onnx(model: Model, folder: Path) -> None:
    """Write image.onnx, text.onnx and score.onnx; weights beyond 2 GB lie beside them in *.onnx.data."""
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
        program.save(folder / f"{graph.name}.onnx", external_data=False)


def require_onnx() -> None:
    """Raise ConfigError unless torch's exporter has its packages."""
    try:
        import onnx
        import onnxscript
    except ImportError as error:
        raise ConfigError(f"ONNX needs {error.name}: pip install 'clipzoo[onnx]'") from None
    del onnx, onnxscript
