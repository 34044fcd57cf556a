"""Distillation: terms of the loss that compare the student with a teacher, `Similarity.teacher`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.nn import functional

from clipzoo.errors import ConfigError
from clipzoo.heads.scores import DenseScores
from clipzoo.types import Batch, Count, NonNegative, Probability, Progress, Scale, Scores, Similarity, Term, checked


class Distillation(nn.Module):
    """Base class of distillations. Parameters train with the model; they are part of a checkpoint of the training.

    name: option of the group `distill`. objective_weight: weight of the objective's own loss.
    """

    name: str
    objective_weight: float = 1.0

    @abstractmethod
    def terms(self, similarity: Similarity, batch: Batch, progress: Progress) -> Mapping[str, Term]:
        """Return parts of the loss by name. similarity: has a teacher."""


def cross_entropy(
    similarity: Similarity, scores_of: Callable[[Similarity], Iterable[Scores]] = attrgetter("directions")
) -> Tensor:
    """Return -mean_i sum_j p_ij log softmax(scores)_ij, where p is the mean of all teachers' softmaxes.

    scores_of: scores of a similarity, whose values are summed and divided by 2, the number of directions.
    """
    chain = [similarity]
    while (teacher := chain[-1].teacher) is not None:
        chain.append(teacher)
    values = []
    for scores, *teachers in zip(*map(scores_of, chain), strict=True):
        expectations = torch.stack([scores.expectation(teacher) for teacher in teachers])
        values.append((scores.log_sum_exp() - expectations.mean(dim=0)).mean())
    return torch.stack(values).sum() / 2


@checked
class OpenClipDistillation(Distillation):
    """Cross-entropy of the teacher's softmax over the batch, in both directions, as in open_clip's DistillClipLoss.

    Student and teacher have their own scales. weight: weight of the term; that of the objective is 1.
    """

    name = "open_clip"

    def __init__(self, weight: NonNegative) -> None:
        super().__init__()
        self._weight = weight

    def terms(self, similarity: Similarity, batch: Batch, progress: Progress) -> Mapping[str, Term]:
        return {"distill": Term(self._weight, cross_entropy(similarity))}


@checked
class DataCompDR(Distillation):
    """Cross-entropy of the mean of the teachers' softmaxes, summed over the captions of an image (MobileCLIP, eq. 3).

    A softmax runs over one caption of each sample: the first, second, ... captions are separate batches, such as real
    and synthetic captions. weight: lambda; the objective's weight is 1 - lambda. Source: Vasu et al. 2024, CVPR.
    """

    name = "datacomp_dr"

    def __init__(self, weight: Probability) -> None:
        super().__init__()
        self._weight, self.objective_weight = weight, 1 - weight

    def terms(self, similarity: Similarity, batch: Batch, progress: Progress) -> Mapping[str, Term]:
        captions, columns = similarity.views.captions, similarity.views.captions + similarity.views.hard
        if captions == 1:
            return {"distill": Term(self._weight, cross_entropy(similarity))}

        def by_caption(one: Similarity) -> Iterator[Scores]:
            # [b, N * columns] and [b * captions, N], texts of a sample in sequence -> [b, N] for each caption.
            images, texts = (scores.dense() for scores in one.directions)
            for k in range(captions):
                yield DenseScores(images.unflatten(1, (-1, columns))[:, :, k])
                yield DenseScores(texts.unflatten(0, (-1, captions))[:, k])

        return {"distill": Term(self._weight, cross_entropy(similarity, by_caption))}


@checked
class ClipKD(Distillation):
    """CLIP-KD's relations (CRD), features (FD) and interactive contrast (ICL); a weight of 0 leaves a term out.

    CRD: KL divergence of the student's softmax from the teacher's. FD: mean squared difference of the teacher's
    embeddings and unit(W x). ICL: InfoNCE of unit(W x) with the teacher's embeddings of the other modality.
    Source: Yang et al. 2024, CVPR.

    width, teacher_width: widths of the embeddings; W is learned if they differ, and the identity if not.
    scale: 1 / temperature of ICL. relations, features, interactive: weights of CRD, FD and ICL.
    """

    name = "clip_kd"

    def __init__(
        self,
        width: Count,
        teacher_width: Count,
        relations: NonNegative,
        features: NonNegative,
        interactive: NonNegative,
        scale: Scale,
    ) -> None:
        super().__init__()
        self._relations, self._features, self._interactive, self._scale = relations, features, interactive, scale
        self.image_map, self.text_map = (
            nn.Identity() if width == teacher_width else nn.Linear(width, teacher_width) for _ in range(2)
        )

    def terms(self, similarity: Similarity, batch: Batch, progress: Progress) -> Mapping[str, Term]:
        teacher, world, terms = similarity.teacher, similarity.world, dict[str, Term]()
        assert teacher is not None
        if self._relations:
            entropy = cross_entropy(replace(teacher, teacher=replace(teacher, teacher=None)))
            terms["relations"] = Term(self._relations, cross_entropy(similarity) - entropy)
        if not (self._features or self._interactive):
            return terms
        # The first image and the first text of each sample.
        image, teacher_image = (vectors(one.image)[:: similarity.views.images] for one in (similarity, teacher))
        text, teacher_text = (vectors(one.text)[:: similarity.views.texts] for one in (similarity, teacher))
        image, text = (functional.normalize(x, dim=1) for x in (self.image_map(image), self.text_map(text)))
        if image.shape[1] != (width := teacher_image.shape[1]):
            raise ConfigError(
                f"distill.teacher_width={image.shape[1]}, but the teacher's embeddings have width {width}: "
                f"give distill.teacher_width={width}"
            )
        if self._features:
            differences = functional.mse_loss(image, teacher_image) + functional.mse_loss(text, teacher_text)
            terms["features"] = Term(self._features, differences)
        if self._interactive:
            positives = torch.arange(len(image), device=image.device) + world.rank * len(image)
            values = [
                functional.cross_entropy(self._scale * anchors @ world.gather(contrasts).mT, positives)
                for anchors, contrasts in ((image, teacher_text), (text, teacher_image))
            ]
            terms["interactive"] = Term(self._interactive, torch.stack(values).mean())
        return terms


def vectors(embedding: object) -> Tensor:
    """Return an embedding that is a tensor [n, d]. Raises ConfigError for a point set."""
    if not isinstance(embedding, Tensor):
        raise ConfigError("distill=clip_kd compares vectors, and a head has point sets: give distill=open_clip")
    return embedding
