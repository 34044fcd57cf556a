"""Tasks of mteb whose data are generated in memory from the sets of `evaluation_sets`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from datasets import Dataset, DatasetDict
from mteb import TaskMetadata
from mteb.abstasks.classification import AbsTaskClassification
from mteb.abstasks.clustering_legacy import AbsTaskClusteringLegacy
from mteb.abstasks.image import AbsTaskImageTextPairClassification
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.sts import AbsTaskSTS
from mteb.abstasks.zeroshot_classification import AbsTaskZeroShotClassification

from clipzoo.evaluation.datasets.dataset import ClassificationDataset
from tests.support.evaluation_sets import COLOURS, TEMPLATES, classes, gallery

SAMPLES = 30
"""Samples of the compositional tasks."""


def metadata(name: str, kind: str, category: str, modalities: list[str], score: str) -> TaskMetadata:
    return TaskMetadata(
        name=name, description=name, type=kind, category=category, modalities=modalities, eval_langs=["eng-Latn"],
        main_score=score, dataset={"path": f"none/{name}", "revision": "1"},
    )  # fmt: skip


def one_template(data: ClassificationDataset) -> ClassificationDataset:
    return replace(data, templates=TEMPLATES[:1])


def split_of(samples) -> Dataset:
    images, labels = zip(*(samples[index] for index in range(len(samples))), strict=True)
    return Dataset.from_dict({"image": list(images), "label": list(labels)})


class InMemory:
    """Data that are made by `make` in place of a download."""

    loads = 0

    def load_data(self, *arguments: Any, **settings: Any) -> None:
        if not self.data_loaded:
            type(self).loads += 1
            self.dataset = self.make()
            self.data_loaded = True

    def make(self) -> DatasetDict:
        data = classes()
        return DatasetDict({name: split_of(samples) for name, samples in data.splits.items()})


class Colours(InMemory, AbsTaskZeroShotClassification):
    metadata = metadata("Colours", "ZeroShotClassification", "i2t", ["image", "text"], "accuracy")

    def get_candidate_labels(self) -> list[str]:
        return [TEMPLATES[0].replace("{c}", name) for name in COLOURS]


class OtherColours(Colours):
    """The same task with the modalities in the order for which mteb calls `similarity`."""

    metadata = metadata("OtherColours", "ZeroShotClassification", "i2t", ["text", "image"], "accuracy")


class ColourProbe(InMemory, AbsTaskClassification):
    metadata = metadata("ColourProbe", "ImageClassification", "i2c", ["image"], "accuracy")
    input_column_name, label_column_name = "image", "label"
    samples_per_label, n_experiments = 4, 2


class ColourClusters(InMemory, AbsTaskClusteringLegacy):
    metadata = metadata("ColourClusters", "ImageClustering", "i2c", ["image"], "v_measure")
    input_column_name, label_column_name = "image", "label"


class Pictures(InMemory, AbsTaskRetrieval):
    """Captions retrieve their image."""

    metadata = metadata("Pictures", "Any2AnyRetrieval", "t2i", ["image", "text"], "ndcg_at_10")

    def make(self) -> Any:
        data = gallery()
        images = Dataset.from_dict({"id": [f"i{index}" for index in range(len(data.images))], "image": data.images})
        texts = Dataset.from_dict({"id": [f"t{index}" for index in range(len(data.captions))], "text": data.captions})
        pairs = [(f"t{index}", f"i{image}") for index, image in enumerate(data.caption_image)]
        return {"default": {"test": self.sides(texts, images, pairs)}}

    def sides(self, texts: Dataset, images: Dataset, pairs: list[tuple[str, str]]) -> dict[str, Any]:
        relevant = {text: {image: 1} for text, image in pairs}
        return {"queries": texts, "corpus": images, "relevant_docs": relevant, "top_ranked": None}


class Captions(Pictures):
    """Images retrieve their captions."""

    metadata = metadata("Captions", "Any2AnyRetrieval", "i2t", ["image", "text"], "hit_rate_at_1")

    def sides(self, texts: Dataset, images: Dataset, pairs: list[tuple[str, str]]) -> dict[str, Any]:
        relevant: dict[str, dict[str, int]] = {}
        for text, image in pairs:
            relevant.setdefault(image, {})[text] = 1
        return {"queries": images, "corpus": texts, "relevant_docs": relevant, "top_ranked": None}


class Choices(Pictures):
    """Each caption retrieves its image among three."""

    metadata = metadata("Choices", "VisionCentricQA", "t2i", ["image", "text"], "hit_rate_at_1")

    def sides(self, texts: Dataset, images: Dataset, pairs: list[tuple[str, str]]) -> dict[str, Any]:
        count = len(images)
        ranked = {text: [f"i{(int(image[1:]) + step) % count}" for step in (2, 0, 5)] for text, image in pairs}
        return super().sides(texts, images, pairs) | {"top_ranked": ranked}


class SamePictures(Pictures):
    """Images retrieve themselves."""

    metadata = metadata("SamePictures", "Any2AnyRetrieval", "i2i", ["image"], "hit_rate_at_1")

    def sides(self, texts: Dataset, images: Dataset, pairs: list[tuple[str, str]]) -> dict[str, Any]:
        relevant = {name: {name: 1} for name in images["id"]}
        return {"queries": images, "corpus": images, "relevant_docs": relevant, "top_ranked": None}


class CaptionedPictures(Pictures):
    """Images with their captions retrieve the images."""

    metadata = metadata("CaptionedPictures", "Any2AnyRetrieval", "it2i", ["image", "text"], "hit_rate_at_1")

    def sides(self, texts: Dataset, images: Dataset, pairs: list[tuple[str, str]]) -> dict[str, Any]:
        queries = images.add_column("text", [f"{name} thing" for name in images["id"]])
        relevant = {name: {name: 1} for name in images["id"]}
        return {"queries": queries, "corpus": images, "relevant_docs": relevant, "top_ranked": None}


class Compositions(InMemory, AbsTaskImageTextPairClassification):
    """Samples of two images and their captions, as in Winoground."""

    metadata = metadata("Compositions", "Compositionality", "i2t", ["image", "text"], "accuracy")
    images_column_names, texts_column_names = ("image_0", "image_1"), ("text_0", "text_1")

    def make(self) -> DatasetDict:
        images, texts = self.images_column_names, self.texts_column_names
        data = gallery(images=SAMPLES * len(images), captions=3)
        columns = {name: data.images[part :: len(images)] for part, name in enumerate(images)}
        columns |= {name: data.captions[part :: len(texts)][:SAMPLES] for part, name in enumerate(texts)}
        return DatasetDict({"test": Dataset.from_dict(columns)})


class Negatives(Compositions):
    """Samples of one image, its caption and two wrong ones, as in SugarCrepe."""

    metadata = metadata("Negatives", "Compositionality", "i2t", ["image", "text"], "text_acc")
    images_column_names, texts_column_names = ("image_0",), ("text_0", "text_1", "text_2")


class SimilarColours(InMemory, AbsTaskSTS):
    """Pairs of images with the distance of their colours."""

    metadata = metadata("SimilarColours", "VisualSTS(eng)", "i2i", ["image"], "cosine_spearman")
    column_names = ({"image_1": "image"}, {"image_2": "image"})
    min_score, max_score = 0, 1

    def make(self) -> DatasetDict:
        images = gallery().images
        scores = [index / 11 for index in range(12)]
        columns = {"image_1": images[:12], "image_2": images[1:13], "score": scores}
        return DatasetDict({"test": Dataset.from_dict(columns)})


class CaptionClasses(InMemory, AbsTaskClassification):
    """Captions and the colours in them."""

    metadata = metadata("CaptionClasses", "Classification", "t2c", ["text"], "accuracy")

    def make(self) -> DatasetDict:
        texts = gallery().captions
        labels = [list(COLOURS).index(text.split()[0]) for text in texts]
        data = Dataset.from_dict({"text": texts, "label": labels})
        return DatasetDict({"train": data, "test": data})
