"""Models as encoders of mteb (https://github.com/embeddings-benchmark/mteb, 2.26), and its tasks in an evaluation.

mteb passes embeddings as arrays. `MtebEncoder.encode` returns them by the type of the task:

- FEATURES fit classifiers or clusters to vectors: those of the head's linear probe, after the projection.
- SEARCHES call `similarity`: embeddings of any head as rows of numbers, which `similarity` scores with the head.
- COSINES compute cosines of captions, or of images: embeddings of heads whose score is a cosine; others are refused.
- CLASSES and PAIRS compute cosines of images with captions, and encode the captions first. Captions become unit vectors
  along axes, and an image becomes its scores along them: the cosine is the score times a constant, for any head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipzoo import io
from clipzoo.distributed.launch import say
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError, installation
from clipzoo.evaluation.encoder import BatchEncoder, joined
from clipzoo.evaluation.scoring import score_blocks
from clipzoo.evaluation.task import Evaluation
from clipzoo.io.weights import from_hub
from clipzoo.model import Model
from clipzoo.runs.record import MetricKey, written
from clipzoo.types import Embedding, PointSet, concatenate

if TYPE_CHECKING:
    from mteb import AbsTask, TaskMetadata

FEATURES = (
    "Classification", "MultilabelClassification", "Regression", "Clustering", "ImageClassification", "ImageClustering",
)  # fmt: skip
SEARCHES = (
    "Retrieval", "Reranking", "InstructionRetrieval", "InstructionReranking", "BitextMining", "Any2AnyRetrieval",
    "Any2AnyReranking", "Any2AnyMultilingualRetrieval", "VisionCentricQA", "DocumentUnderstanding",
)  # fmt: skip
COSINES = ("STS", "VisualSTS(eng)", "VisualSTS(multi)", "PairClassification", "Summarization")
CLASSES, PAIRS = "ZeroShotClassification", "Compositionality"
MOST_CAPTIONS = 64
"""Largest number of captions in a sample of PAIRS."""
IMAGE, BOTH, TEXT = range(3)
"""Inputs of a row. Of two rows, `similarity` takes that with the lower number as the head's image."""


class MtebEncoder:
    """A model with the methods of mteb's `EncoderProtocol`.

    encoder: pre-processing, tokenizer, batch size and precision. name, revision: those in mteb's own cache of results.
    """

    def __init__(self, model: Model, encoder: BatchEncoder, name: str, revision: str) -> None:
        if find_spec("mteb") is None:
            raise ConfigError(f"mteb is not installed: {installation('mteb')}")
        from mteb.models import ModelMeta

        self._model, self._encoder = model, encoder
        self._captions: Embedding | None = None
        facts = {"name": name, "revision": revision, "modalities": ["image", "text"], "use_instructions": False}
        self.mteb_model_meta = ModelMeta.create_empty(facts)

    @torch.no_grad()
    def encode(self, inputs: Any, *, task_metadata: TaskMetadata, **_: Any) -> Tensor:
        """Images, captions, or images with captions, of mteb's DataLoader -> [n, w] on the CPU, one row for each.

        Captions are encoded without instructions. Raises ConfigError for a type of task that the head cannot serve.
        """
        head, task, data = self._model.head, task_metadata.type, inputs.dataset
        refused = f"eval.mteb: {task_metadata.name}, {task}, {{}}: leave the task out for {type(head).__name__}"
        if task not in (*FEATURES, *SEARCHES, *COSINES, CLASSES, PAIRS):
            raise ConfigError(refused.format("is of a type that clipzoo does not know"))
        if task in COSINES and head.log_cosine_scale() is None:
            raise ConfigError(refused.format("compares cosines, and the score is not a cosine"))
        parts: dict[int, Embedding] = {}
        if "image" in data.features:
            embed = partial(head.probe, where="after") if task in FEATURES else head.embed_image
            # mteb lists the images of PAIRS itself; columns of other datasets are read by row.
            images, size = data.images if task == PAIRS else data["image"], self._encoder.image_size
            batches = self._encoder.images(self._model, images, size, [lambda features, _: embed(features)])
            (parts[IMAGE],) = joined(list(batches))
        if "text" in data.features:
            (parts[TEXT],) = self._encoder.embed_captions(self._model, list(data["text"]), 1)
        if len(parts) == 2:
            if task not in SEARCHES or not head.compares_within:
                raise ConfigError(refused.format("embeds images together with captions"))
            pairs = (concatenate([part[row : row + 1] for part in parts.values()]) for row in range(len(data)))
            parts = {BOTH: concatenate([head.ensemble(pair) for pair in pairs])}
        ((kind, rows),) = parts.items()
        # mteb's own condition for cosines in place of `similarity`.
        if task == PAIRS or (task == CLASSES and task_metadata.modalities == ["image", "text"]):
            return self._scores(rows, kind, task)
        width = 0
        if isinstance(rows, PointSet):
            if task in FEATURES:
                raise ConfigError(refused.format("needs vectors, and captions are sets of points"))
            points = torch.cat([rows.points, rows.log_weights[:, :, None]], dim=2)
            rows, width = points.flatten(1), points.shape[2]
        if task not in FEATURES:
            # Zeros change no cosine.
            prefix = rows.new_tensor([[0 if task in COSINES else kind, width]])
            rows = torch.cat([prefix.expand(len(rows), 2), rows], dim=1)
        return rows.to("cpu", torch.promote_types(rows.dtype, torch.float32))

    @torch.no_grad()
    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Rows of SEARCHES or COSINES, [n, w] and [k, w] -> scores of the head, [n, k]."""
        (first, left), (second, right) = self._embedding(embeddings1), self._embedding(embeddings2)
        if first > second:
            return self.similarity(embeddings2, embeddings1).mT
        if first == second and not self._model.head.compares_within:
            name = type(self._model.head).__name__
            raise ConfigError(f"eval.mteb: {name} compares images with captions only: leave tasks of one modality out")
        return torch.cat([scores.cpu() for _, scores in score_blocks(self._model, left, right)])

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Rows, twice [n, w] -> scores of the head, [n]."""
        pairs = zip(embeddings1, embeddings2, strict=True)
        return torch.cat([self.similarity(one[None], other[None])[0] for one, other in pairs])

    def _embedding(self, array: Any) -> tuple[int, Embedding]:
        """Rows from `encode` -> kind of inputs, such as IMAGE, and embeddings."""
        rows = torch.as_tensor(array).to(self._model.device)
        (kind, width), values = rows[0, :2].int().tolist(), rows[:, 2:].to(self._model.dtype)
        points = values.unflatten(1, (-1, width)) if width else None
        return kind, values if points is None else PointSet(points[:, :, :-1], points[:, :, -1])

    def _scores(self, embedding: Embedding, kind: int, task: str) -> Tensor:
        """Captions, then images -> [n, w + 1] float64: axes of the captions, then scores in rows of equal norm.

        In PAIRS image i of n belongs to captions near i k / n of k, and only has axes for MOST_CAPTIONS on both sides.
        """
        self._captions = embedding if kind == TEXT else self._captions
        assert self._captions is not None
        count = len(self._captions)
        reach = count if task == CLASSES else MOST_CAPTIONS
        width = min(count, 2 * reach + 1)
        if kind == TEXT:
            return torch.eye(width + 1, dtype=torch.float64)[torch.arange(count) % width]
        rows = torch.zeros(len(embedding), width + 1, dtype=torch.float64)
        for index, row in enumerate(rows):
            place = index * count // len(rows)
            low, high = max(0, place - reach), min(count, place + reach + 1)
            near = self._captions[low:high]
            ((_, scores),) = score_blocks(self._model, embedding[index : index + 1], near)
            row[torch.arange(low, high) % width] = scores[0].double().cpu()
        squares = rows.square().sum(dim=1)
        rows[:, -1] = (squares.max().clamp(min=1) - squares).sqrt()
        return rows


def open_task(name: Any) -> AbsTask:
    """Return a task of mteb with its data. name: its name, or the task itself. Raises ConfigError if it is missing."""
    if find_spec("mteb") is None:
        raise ConfigError(f"eval.mteb needs mteb: {installation('mteb')}")
    # mteb seeds the random numbers of torch.
    with torch.random.fork_rng(range(torch.cuda.device_count())), from_hub("", f"eval.mteb: {name} cannot be opened"):
        import mteb

        try:
            task = name if isinstance(name, mteb.AbsTask) else mteb.get_task(name)
        except KeyError as error:
            raise ConfigError(f"eval.mteb: {error.args[0]}") from None
        for part in getattr(task, "tasks", [task]):  # an aggregate has several
            part.load_data()
    return task


def evaluate_tasks(tasks: Sequence[AbsTask], evaluation: Evaluation, key: str) -> dict[str, float]:
    """Return the main scores in percent, "mteb/TASK/SCORE", and for several parts "mteb/TASK/SPLIT/SUBSET/SCORE".

    mteb/TASK.json keeps all scores of a task, and is read for the same `key`, mteb, splits and subsets. key: cache key
    of the model. Not collective: this rank encodes everything.
    """
    import mteb

    found: dict[str, float] = {}
    encoder = MtebEncoder(evaluation.model, replace(evaluation.encoder, world=World()), "clipzoo/model", key)
    quiet: Any = {"show_progress_bar": False}
    for task in tasks:
        name, score = task.metadata.name, task.metadata.main_score
        path = io.below(evaluation.output, f"mteb/{name}.json")
        full_key = f"{key} {mteb.__version__} {type(task)} {task.metadata.dataset} {task.eval_splits} {task.hf_subsets}"
        stored: Any = io.DamageLog().read(partial(io.read_json, path, 64 * io.MB), {}) if path.exists() else {}
        if stored.get("key") != full_key:
            with torch.random.fork_rng(range(torch.cuda.device_count())):
                results = mteb.evaluate(encoder, task, cache=None, co2_tracker=False, encode_kwargs={**quiet}, **quiet)
            (result,) = results.task_results
            parts = {f"{split}/{row['hf_subset']}": row for split, rows in result.scores.items() for row in rows}
            values = {"": result.get_score()} | {place: parts[place]["main_score"] for place in parts if len(parts) > 1}
            metrics = {MetricKey("mteb", name, place, score): 100 * values[place] for place in values}
            stored = {"key": full_key, "metrics": written(metrics), "scores": result.scores}
            io.write_json(path, stored)
        found |= stored["metrics"]
        say(f"evaluation: mteb {name}: {score} {stored['metrics'][f'mteb/{name}/{score}']:.2f}")
    return found
