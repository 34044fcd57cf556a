"""A model as three graphs of tensors: what torch.export and ONNX hold of every head.

image: pixels [b, 3, S, S] uint8 -> embeddings. text: token ids [b, L] int64, L the context length -> embeddings.
score: image and text embeddings -> logits [n, k]. An embedding is one tensor, or points and log-weights of a point set,
in which -inf marks an absent point. b, n and k are any numbers from 1.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.onnx
from torch import Tensor, nn

from clipzoo import io
from clipzoo.errors import TrainingError
from clipzoo.heads.base import Head
from clipzoo.io import below
from clipzoo.model import Model
from clipzoo.types import Embedding, PointSet

EXAMPLES = 3
"""Rows of the inputs with which a graph is traced; torch takes 0 and 1 for constants."""


@dataclass(frozen=True)
class Graph:
    """name: "image", "text" or "score". module: maps the inputs to a tuple of outputs.

    inputs: examples by name. outputs: names. rows: name of the leading dimension by input and output.
    """

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]
    rows: dict[str, str]

    def program(self) -> torch.export.ExportedProgram:
        """Trace the graph, with every leading dimension dynamic."""
        batches = {name: torch.export.Dim(name, min=1) for name in sorted(set(self.rows.values()))}
        shapes = tuple({0: batches[self.rows[name]]} for name in self.inputs)
        with _portable():
            return torch.export.export(self.module, tuple(self.inputs.values()), dynamic_shapes=(shapes,), strict=False)


def graphs(model: Model) -> list[Graph]:
    """Return the graphs of a model in evaluation mode; a stochastic head keeps its evaluation draw."""
    encoder = model.encoder
    pixels = torch.randint(256, (EXAMPLES, 3, encoder.image_size, encoder.image_size), dtype=torch.uint8)
    tokens = encoder.tokenizer(["a photo", "", "a red circle above a blue square"][:EXAMPLES])
    pixels, tokens = pixels.to(model.device), tokens.to(model.device)
    with torch.no_grad():
        image, text = _tensors(model.encode_image(pixels)), _tensors(model.encode_text(tokens))
        # Other numbers of images than of captions: the two must not be taken for one dimension.
        text = [torch.cat([tensor, tensor]) for tensor in text]
    image_names, text_names = _names("image", image), _names("text", text)
    pairs = dict(zip((*image_names, *text_names), (*image, *text), strict=True))
    score_rows = {**dict.fromkeys(image_names, "images"), **dict.fromkeys(text_names, "captions")}
    return [
        Graph("image", _Embed(model, "encode_image"), {"pixels": pixels}, image_names,
              dict.fromkeys(("pixels", *image_names), "images")),
        Graph("text", _EmbedText(model), {"tokens": tokens}, text_names,
              dict.fromkeys(("tokens", *text_names), "captions")),
        Graph("score", _Score(model.head, len(image)), pairs, ("logits",), {**score_rows, "logits": "images"}),
    ]  # fmt: skip


def write_torch(model: Model, folder: Path) -> None:
    """Write the graphs as programs, which `torch.export.load("image.pt2").module()` runs without clipzoo."""
    for graph in graphs(model):
        with io.whole(io.below(folder, f"{graph.name}.pt2")) as file:
            torch.export.save(graph.program(), file)


class _Embed(nn.Module):
    """One of the model's methods, from a tensor to the tensors of an embedding."""

    def __init__(self, model: Model, method: str) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(_tensors(getattr(self.model, self.method)(*inputs)))


class _EmbedText(nn.Module):
    """Token ids to the tensors of an embedding, in one batch: groups of captions of one length depend on the ids."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        features = self.model.encoder.text(inputs[0]).map(lambda tensor: tensor.to(self.model.dtype))
        return tuple(_tensors(self.model.head.embed_text(features)))


class _Score(nn.Module):
    """The head's score. parts: number of tensors of an embedding."""

    def __init__(self, head: Head, parts: int) -> None:
        super().__init__()
        self.head, self.parts = head, parts

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        image, text = inputs[: self.parts], inputs[self.parts :]
        return (self.head.score(_embedding(image), _embedding(text)),)


def _tensors(embedding: Embedding) -> list[Tensor]:
    return [embedding.points, embedding.log_weights] if isinstance(embedding, PointSet) else [embedding]


def _embedding(tensors: tuple[Any, ...]) -> Embedding:
    return PointSet(*tensors) if len(tensors) > 1 else tensors[0]


def _names(side: str, tensors: list[Tensor]) -> tuple[str, ...]:
    parts = ("embedding",) if len(tensors) == 1 else ("points", "log_weights")
    return tuple(f"{side}_{part}" for part in parts)


@contextmanager
def _portable() -> Iterator[None]:
    """Trace without torch's fused encoder layer, which no other runtime has."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


# ONNX graphs, for onnxruntime and every other runtime of that format.


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
