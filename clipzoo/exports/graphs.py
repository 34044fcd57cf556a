"""A model as three graphs of tensors, in which torch.export and ONNX can represent every head.

image: pixels [b, 3, S, S] uint8 -> embeddings. text: token ids [b, L] int64, L the context length -> embeddings.
score: image and text embeddings -> logits [n, k]. An embedding is one tensor, or points and log-weights of a point set,
in which -inf marks an absent point. b, n and k are any numbers from 1.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clipzoo import io
from clipzoo.errors import TrainingError
from clipzoo.model import Model
from clipzoo.types import Embedding, PointSet

EXAMPLES = 3
"""Rows of the inputs with which a graph is traced; torch specialises on sizes 0 and 1."""
OPSET = 20
TOLERANCE = 1e-3
"""Relative and absolute difference of onnxruntime; larger than all observed rounding errors of float32."""


@dataclass(frozen=True)
class Graph:
    """name: "image", "text" or "score". module: maps the inputs to a tuple of outputs.

    inputs: examples by name. outputs: names. rows: name of the leading dimension of every input and output.
    """

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]
    outputs: list[str]
    rows: dict[str, str]

    def program(self) -> torch.export.ExportedProgram:
        """Trace the graph, with every leading dimension dynamic."""
        batches = {name: torch.export.Dim(name, min=1) for name in ("images", "captions")}
        shapes = tuple({0: batches[self.rows[name]]} for name in self.inputs)
        # Without torch's fused encoder layer, which no other runtime has.
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with torch.no_grad():
                inputs = tuple(self.inputs.values())
                return torch.export.export(self.module, inputs, dynamic_shapes=(shapes,), strict=False)
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)


class _Traced(nn.Module):
    """A function of tensors, computed with a model or its head."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.function(*inputs)


def graphs(model: Model) -> list[Graph]:
    """Return the graphs of a model in evaluation mode; a stochastic head keeps its evaluation draw."""
    encoder, head = model.encoder, model.head

    def tensors(embedding: Embedding) -> tuple[Tensor, ...]:
        return (embedding.points, embedding.log_weights) if isinstance(embedding, PointSet) else (embedding,)

    def embed_image(pixels: Tensor) -> tuple[Tensor, ...]:
        return tensors(model.encode_image(pixels))

    def embed_text(tokens: Tensor) -> tuple[Tensor, ...]:
        # In one batch: groups of captions of similar length would depend on the ids.
        return tensors(head.embed_text(encoder.text(tokens).map(lambda tensor: tensor.to(model.dtype))))

    def score(*inputs: Any) -> tuple[Tensor, ...]:
        return (head.score(*inputs) if len(inputs) == 2 else head.score(PointSet(*inputs[:2]), PointSet(*inputs[2:])),)

    pixels = torch.randint(256, (EXAMPLES, 3, encoder.image_size, encoder.image_size), dtype=torch.uint8)
    tokens = encoder.tokenizer(["a photo", "", "a red circle above a blue square"][:EXAMPLES])
    pixels, tokens = pixels.to(model.device), tokens.to(model.device)
    with torch.no_grad():
        image, text = embed_image(pixels), tensors(model.encode_text(tokens))
    parts = ("embedding",) if len(image) == 1 else ("points", "log_weights")
    images, captions = ([f"{side}_{part}" for part in parts] for side in ("image", "text"))
    # The numbers of images and captions differ, so that torch does not merge the two dimensions.
    pairs = dict(zip([*images, *captions], [*image, *(torch.cat([tensor, tensor]) for tensor in text)], strict=True))
    rows = dict.fromkeys(["pixels", *images, "logits"], "images") | dict.fromkeys(["tokens", *captions], "captions")
    return [
        Graph("image", _Traced(embed_image, model=model), {"pixels": pixels}, images, rows),
        Graph("text", _Traced(embed_text, model=model), {"tokens": tokens}, captions, rows),
        Graph("score", _Traced(score, head=head), pairs, ["logits"], rows),
    ]


def write_torch(model: Model, folder: Path) -> None:
    """Write the graphs as programs, which `torch.export.load("image.pt2").module()` runs without clipzoo."""
    for graph in graphs(model):
        with io.whole(io.below(folder, f"{graph.name}.pt2")) as file:
            torch.export.save(graph.program(), file)


def write_onnx(model: Model, folder: Path) -> None:
    """Write *.onnx, weights over 2 GB in *.onnx.data. TrainingError if onnxruntime computes other values than torch."""
    import torch.onnx  # takes a third of a second to import
    from onnxruntime import InferenceSession

    for graph in graphs(model):
        with warnings.catch_warnings():
            # torch warns that inputs of equal length share one name.
            warnings.filterwarnings("ignore", ".*axis name.*")
            program = torch.onnx.export(
                graph.program(),
                input_names=list(graph.inputs),
                output_names=graph.outputs,
                dynamic_shapes=(tuple({0: graph.rows[name]} for name in graph.inputs),),
                opset_version=OPSET,
                verbose=False,
            )
        assert program is not None
        path = io.below(folder, f"{graph.name}.onnx")
        program.save(path)
        session = InferenceSession(path, providers=["CPUExecutionProvider"])
        results = session.run(None, {name: tensor.cpu().numpy() for name, tensor in graph.inputs.items()})
        with torch.no_grad():
            expected = graph.module(*graph.inputs.values())
        for name, result, tensor in zip(graph.outputs, results, expected, strict=True):
            if not torch.allclose(torch.from_numpy(result), tensor.cpu(), rtol=TOLERANCE, atol=TOLERANCE):
                raise TrainingError(f"{path}: onnxruntime's {name} differs from torch's by more than {TOLERANCE}")
