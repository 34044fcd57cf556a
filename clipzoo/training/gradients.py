"""The gradient of one batch, whole or in micro-batches, averaged over ranks.

The graph is always cut at the features. Head and objective compute the loss on detached features; its gradient with
respect to them is then passed to the encoders, whose graph is either that of the first forward pass (the whole batch
at once) or is computed again, one micro-batch at a time (GradCache, Gao et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Literal

import torch
from torch import Tensor, nn

from clipzoo.distillation import Distillation
from clipzoo.distributed.parallel import OTHER_RANKS, OWN_PASSES, Mark, Parallel
from clipzoo.distributed.world import World, step_part
from clipzoo.encoders.base import Tower, encode_by_length, longest_list
from clipzoo.heads.pairs import Scope, batch_pairing
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.training import diagnostics
from clipzoo.training.parts import Teacher
from clipzoo.training.tuned import VIEWS, FeatureCache, View
from clipzoo.types import Batch, Features, Loss, Progress, Similarity


class GradientCache:
    """Computes losses and their gradients; micro-batches and ranks change neither.

    micro_batch: samples that pass the encoders at once on a rank; None for the rank's whole batch. Smaller ones cost
    one more forward pass and save the memory of activations. Only batch norm differs: it normalises each
    micro-batch by itself and counts it once in its running statistics.
    tile: see Scope. autocast: see PairEncoder. compile: run the encoders through torch.compile, or with "step" head and
    objective too; operations that it cannot trace, such as collectives, run between its graphs.
    caches: feature caches of frozen towers, by view. parallel: how ranks share the model's weights; None for
    a copy on every rank. distill: adds terms to the loss. teacher: gives `Similarity.teacher`; None for none.

    A tower without a parameter that trains is encoded once, without a graph, and has no backward pass.
    """

    def __init__(
        self,
        model: Model,
        objective: Objective,
        world: World,
        micro_batch: int | None = None,
        tile: int | None = None,
        autocast: torch.dtype | None = None,
        compile: Literal[False, True, "step"] = False,
        caches: Mapping[View, FeatureCache] | None = None,
        parallel: Parallel[Model] | None = None,
        distill: Distillation | None = None,
    ) -> None:
        self.tile, self.autocast = tile, autocast
        self.parallel = Parallel(model, world) if parallel is None else parallel
        self.model, self.objective, self.world = self.parallel.trained, objective, world
        self.distill, self._micro_batch = distill, micro_batch
        self.teacher: Teacher | None = None
        self.encoder = PairEncoder(self.model, autocast, bool(compile))
        self._score = torch.compile(self._loss) if compile == "step" else self._loss
        self._caches = caches or {}
        for cache in self._caches.values() if self.parallel.equal_passes else ():
            cache.any_rank = self.parallel.any_rank
        self._trained = []
        for view in VIEWS:
            # An encoder without towers is one tower.
            parameters = list(self.model.encoder.towers.get(view, self.model.encoder).parameters())
            if not parameters or any(parameter.requires_grad for parameter in parameters):
                self._trained.append(view)
        others = [model.head, objective, *filter(None, [distill])]
        self._others = [p for module in others for p in module.parameters() if p.requires_grad]
        world.broadcast_(parameter.detach() for parameter in self._others)
        self._shared = self.parallel.wrap(self.encoder, self.encoder.blocks())
        self._mark: Mark = lambda part: None
        self.parallel.time_passes(lambda part: self._mark(part))

    def __call__(
        self,
        batch: Batch,
        progress: Progress,
        scale: float | Tensor = 1.0,
        mark: Mark | None = None,
        diagnose: bool = False,
        train_encoder: bool = True,
    ) -> Loss:
        """Add the gradient of `scale` times the batch's loss, averaged over ranks, to all parameters; return the loss.

        batch: this rank's share of the global batch. mark: called with "forward" and "backward" when each is done, and
        with OWN_PASSES and OTHER_RANKS around waits for other ranks.
        diagnose: also log the diagnostics of similarities and embeddings.
        train_encoder: False to train only head and objective. The returned loss is without the scale.
        """
        self._mark = mark or (lambda part: None)
        micro_batches = batch.split(self._micro_batch or len(batch))
        whole = len(micro_batches) == 1
        trained = self._trained if train_encoder else []
        scope = Scope(self.world, self.tile, batch.views, batch_pairing(batch, self.world, self.objective.same_caption))
        with torch.no_grad():
            constant = {
                view: encode_view(self.encoder, view, micro_batches, self._caches.get(view))
                for view in VIEWS
                if view not in trained
            }
            with step_part("teacher"):
                teacher = None if self.teacher is None else self.teacher(micro_batches, constant, scope)
        random_states: list[tuple[Tensor, Tensor | None]] = []
        features: list[Features] = []
        if trained and whole:
            features = encode(self._shared, batch, trained)
        elif trained:
            # The first pass has no graph. The second one restores the random state before each micro-batch.
            encoded = []
            for micro_batch in micro_batches:
                device = micro_batch.image.device
                on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
                random_states.append((torch.get_rng_state(), on_gpu))
                with torch.no_grad():
                    encoded.append(encode(self.encoder, micro_batch, trained))
            features = [joined(parts) for parts in zip(*encoded, strict=True)]
        # Detached copies, the leaves of a new graph.
        leaves = {
            view: view_features.map(lambda tensor: tensor.detach().requires_grad_())
            for view, view_features in zip(trained, features, strict=True)
        }
        self._mark(OWN_PASSES)
        similarity, loss = self._score({**constant, **leaves}, scope, teacher, batch, progress)
        if diagnose:
            with torch.no_grad():
                assert similarity.image is not None and similarity.text is not None
                firsts = similarity.image[:: batch.views.images], similarity.text[:: batch.views.texts]
                of_pairs = diagnostics.embedding_diagnostics(*firsts)
            loss = Loss(loss.total, {**loss.logs, **diagnostics.similarity_diagnostics(similarity), **of_pairs})
        self._mark("forward")
        with step_part("backward"):
            (loss.total * scale).backward()
            # Average the gradients of head and objective over ranks; `parallel` averages those of the encoder.
            others = [parameter.grad for parameter in self._others if parameter.grad is not None]
            if self.world.size > 1 and others:
                mean = self.world.mean(torch.cat([gradient.flatten() for gradient in others]))
                for gradient, part in zip(others, mean.split([gradient.numel() for gradient in others]), strict=True):
                    gradient.copy_(part.view_as(gradient))
            # Zeros for tensors that the head does not read: DDP needs a gradient of every parameter.
            tensors = _tensors(leaves.values())
            gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in tensors]
            self._mark(OTHER_RANKS)
            if trained and whole:
                _backward(features, gradients)
            elif trained:
                # Encode each micro-batch again, with the random numbers of its first pass, and add its gradient.
                device = micro_batches[0].image.device
                buffers = [(buffer, buffer.clone()) for buffer in self.encoder.buffers()]
                # A sample may have several rows.
                samples = sum(map(len, micro_batches))
                split = [gradient.split(len(gradient) // samples * len(micro_batches[0])) for gradient in gradients]
                with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
                    states = enumerate(zip(micro_batches, random_states, strict=True))
                    for index, (micro_batch, (on_cpu, on_gpu)) in states:
                        torch.set_rng_state(on_cpu)
                        if on_gpu is not None:
                            torch.cuda.set_rng_state(on_gpu, device)
                        with self.parallel.accumulating(last=index == len(micro_batches) - 1):
                            _backward(encode(self._shared, micro_batch, trained), [parts[index] for parts in split])
                for buffer, value in buffers:
                    buffer.copy_(value)
            self.parallel.end_step()
        self._mark("backward")
        return loss

    def _loss(
        self,
        features: Mapping[View, Features],
        scope: Scope,
        teacher: Similarity | None,
        batch: Batch,
        progress: Progress,
    ) -> tuple[Similarity, Loss]:
        """Return the scores of the features and the loss with all terms."""
        with step_part("head"):
            similarity = self.model.compare(features["image"], features["text"], scope)
        with step_part("objective"):
            similarity = similarity if teacher is None else replace(similarity, teacher=teacher)
            loss = self.objective(similarity, batch, progress)
            terms = {**self.model.head.terms(similarity), **self.objective.terms(similarity, batch, progress)}
            if self.distill is not None:
                terms |= self.distill.terms(similarity, batch, progress)
                loss = replace(loss, total=self.distill.objective_weight * loss.total)
            if terms:
                total = loss.total + sum(term.weight * term.value for term in terms.values())
                logs = {f"term_{name}": term.value.detach() for name, term in terms.items()}
                loss = Loss(total, {**loss.logs, **logs})
        return similarity, loss


def encode(encoder: nn.Module, batch: Batch, views: Sequence[View]) -> list[Features]:
    """Return the features of the views. encoder: a PairEncoder, or the module that ranks call in its place."""
    return [Features(*tensors) for tensors in encoder(batch, views)]


def encode_view(
    encoder: nn.Module,
    view: View,
    micro_batches: Sequence[Batch],
    cache: FeatureCache | None = None,
    convert: Callable[[Batch], Batch] = lambda batch: batch,
) -> Features:
    """Return the features of one view of all micro-batches, from its cache if it has one. convert: changes inputs."""

    def computed(batch: Batch) -> Features:
        return encode(encoder, convert(batch), [view])[0]

    return joined([computed(batch) if cache is None else cache(batch, computed) for batch in micro_batches])


def _backward(features: Sequence[Features], gradients: Sequence[Tensor]) -> None:
    """Backpropagate gradients of the features through the encoders. Constant features are skipped."""
    pairs = [pair for pair in zip(_tensors(features), gradients, strict=True) if pair[0].requires_grad]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


def _tensors(features: Iterable[Features]) -> list[Tensor]:
    """Return the float tensors of the views."""
    return [tensor for view in features for tensor in (view.pooled, view.tokens) if tensor is not None]


def joined(parts: Sequence[Features]) -> Features:
    """Return the features of micro-batches as those of one batch."""
    columns = zip(*((part.pooled, part.tokens, part.mask) for part in parts), strict=True)
    pooled, tokens, mask = (None if column[0] is None else torch.cat(column) for column in columns)
    assert pooled is not None
    return Features(pooled, tokens, mask)


class PairEncoder(nn.Module):
    """The encoder as one module with one forward, batch -> features of the views.

    Returns the fields of Features as tuples, where DDP and FSDP find tensors; tokens only if the head reads them.

    autocast: precision of the encoders; None for the precision of their parameters.
    compile: run the encoders through torch.compile; evaluation runs them without it.
    """

    def __init__(self, model: Model, autocast: torch.dtype | None, compile: bool) -> None:
        super().__init__()
        self.encoder = model.encoder
        self._autocast, self._needs_tokens = autocast, model.head.needs_tokens
        image, text = model.image_read_by_head, model.text_read_by_head
        self._image, self._text = (torch.compile(image), torch.compile(text)) if compile else (image, text)

    def forward(self, batch: Batch, views: Sequence[View] = VIEWS) -> list[tuple[Tensor | None, ...]]:
        features: list[Features] = []
        with torch.autocast(batch.image.device.type, self._autocast, enabled=self._autocast is not None):
            for view in views:
                with step_part(f"{view} tower"):
                    if view == "image":
                        features.append(self._image(batch.images))
                    else:
                        text, lengths = batch.texts, batch.text_lengths
                        features.append(encode_by_length(self._text, text, lengths, self._needs_tokens))
        if not self._needs_tokens:
            return [(view.pooled, None, None) for view in features]
        return [(view.pooled, view.tokens, view.mask) for view in features]

    def blocks(self) -> list[nn.Module]:
        """Return the blocks of both towers, or of an encoder without towers: its longest list of modules."""
        towers = list(self.encoder.towers.values()) or [self.encoder]
        blocks = [tower.layers() if isinstance(tower, Tower) else longest_list(tower) for tower in towers]
        return list(dict.fromkeys(block for tower_blocks in blocks for block in tower_blocks))


class Float8Linears:
    """Layers of torchao with products in float8, in place of an encoder's linear layers while they are `active`.

    They share the parameters of the encoder's own layers, which evaluations and checkpoints use. Sizes that 16 does not
    divide and torch's attention modules stay as they are. emulate: multiply rounded numbers in float32, on any device.
    """

    def __init__(self, encoder: nn.Module, emulate: bool = False) -> None:
        # Not among the requirements.
        float8 = import_module("torchao.float8")
        config = float8.Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
        self.layers: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []
        for parent in encoder.modules():
            for name, layer in parent.named_children():
                if type(layer) is nn.Linear and layer.in_features % 16 == layer.out_features % 16 == 0:
                    (converted,) = float8.convert_to_float8_training(nn.Sequential(layer), config=config)
                    self.layers.append((parent, name, layer, converted))

    @contextmanager
    def active(self) -> Iterator[None]:
        for parent, name, _, converted in self.layers:
            setattr(parent, name, converted)
        try:
            yield
        finally:
            for parent, name, layer, _ in self.layers:
                setattr(parent, name, layer)
