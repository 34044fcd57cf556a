"""Geometry of an embedding, against direct computations with numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.evaluation import diagnosis
from clipzoo.evaluation.diagnosis import Diagnosis, diagnose, map_of
from clipzoo.evaluation.task import Evaluation, compute
from clipzoo.runs.record import MetricKey, read_arrays
from tests.support.evaluation_sets import batch_encoder, classes, gallery, model_of
from tests.support.ranks import run_ranks


def pairs(count: int = 700, width: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors of both modalities: the captions are noisy copies of the images, moved by a gap."""
    generator = torch.Generator().manual_seed(0)
    image, noise = torch.randn(2, count, width, generator=generator, dtype=torch.float64)
    return image + 0.5, image + 0.7 * noise - 0.1


def unit(vectors: torch.Tensor) -> np.ndarray:
    return vectors.numpy() / np.linalg.norm(vectors.numpy(), axis=1, keepdims=True)


def nearest(query: np.ndarray, vectors: np.ndarray, without: int | None = None) -> set[int]:
    """The ten nearest rows, by their distances."""
    order = np.argsort(np.linalg.norm(vectors - query, axis=1))
    return set([int(row) for row in order if row != without][:10])


def numpys(image: np.ndarray, text: np.ndarray) -> dict[str, dict[str, float]]:
    """All metrics by their definitions."""
    count = len(image)

    def uniformity(vectors: np.ndarray) -> float:
        others = [np.exp(-2 * ((np.delete(vectors, row, 0) - vectors[row]) ** 2).sum(1)) for row in range(count)]
        return float(np.log(np.mean(others)))

    def effective_rank(vectors: np.ndarray) -> float:
        values = np.linalg.svd(vectors - vectors.mean(0), compute_uv=False)
        shares = values / values.sum()
        return float(np.exp(-(shares * np.log(shares)).sum()))

    def hubness(queries: np.ndarray, vectors: np.ndarray) -> float:
        occurrences = np.zeros(count)
        for query in queries:
            occurrences[list(nearest(query, vectors))] += 1
        return float(((occurrences - occurrences.mean()) ** 3).mean() / occurrences.std() ** 3)

    means = image.mean(0), text.mean(0)
    right = [
        np.linalg.norm(vector - means[side]) < np.linalg.norm(vector - means[1 - side])
        for side, vectors in enumerate((image, text))
        for vector in vectors
    ]
    agreements = [len(nearest(image[row], image, row) & nearest(text[row], text, row)) / 10 for row in range(count)]
    return {
        "": {
            "modality_gap": float(np.linalg.norm(means[0] - means[1])), "separability": float(np.mean(right)),
            "alignment": float(((image - text) ** 2).sum(1).mean()), "neighbour_agreement": float(np.mean(agreements)),
        },
        "image": {"effective_rank": effective_rank(image), "uniformity": uniformity(image)},
        "text": {"effective_rank": effective_rank(text), "uniformity": uniformity(text)},
        "image_to_text": {"hubness": hubness(image, text)},
        "text_to_image": {"hubness": hubness(text, image)},
    }  # fmt: skip


def test_every_number_equals_a_direct_computation_with_numpy():
    image, text = pairs()
    metrics, arrays = diagnose(image, text)
    expected = numpys(unit(image), unit(text))
    assert metrics.keys() == expected.keys()
    for protocol, values in expected.items():
        assert metrics[protocol] == pytest.approx(values, rel=1e-12, abs=1e-12)
    centred = unit(text) - unit(text).mean(0)
    spectrum = np.sqrt(np.linalg.eigvalsh(centred.T @ centred)[::-1] / len(text))
    np.testing.assert_allclose(arrays["spectrum_text"], spectrum, rtol=1e-10)
    assert arrays["occurrences_image_to_text"].sum() == 10 * len(image)


def test_the_map_has_the_distances_of_the_projection_with_the_largest_variance():
    image, text = pairs()
    coordinates = map_of(image, text).reshape(-1, 2)
    vectors = np.concatenate([unit(image), unit(text)])
    left, values, _ = np.linalg.svd(vectors - vectors.mean(0), full_matrices=False)
    expected = left[:, :2] * values[:2]
    np.testing.assert_allclose(np.abs(coordinates), np.abs(expected), atol=1e-12)
    assert map_of(*pairs(1500)).shape == (2, diagnosis.MOST_IN_MAP, 2)


def test_closed_forms_of_equal_and_of_orthogonal_vectors():
    # Equal vectors: no gap and no spread..
    equal, _ = diagnose(torch.eye(3)[[0] * 5], torch.eye(3)[[0] * 5])
    assert equal[""] | equal["image"] == {
        "modality_gap": 0.0, "separability": 0.0, "alignment": pytest.approx(0), "neighbour_agreement": 1.0,
        "effective_rank": 0.0, "uniformity": pytest.approx(0),
    }  # fmt: skip
    # n orthonormal vectors: n - 1 equal singular values after centring, all squared distances 2.
    orthonormal, _ = diagnose(torch.eye(6), -torch.eye(6))
    assert orthonormal["text"] == pytest.approx({"effective_rank": 5.0, "uniformity": -4.0})
    assert orthonormal[""]["modality_gap"] == pytest.approx(2 / 6**0.5)
    assert orthonormal[""] | {"modality_gap": 0} == pytest.approx(
        {"modality_gap": 0, "separability": 1.0, "alignment": 4.0, "neighbour_agreement": 1.0}
    )


@torch.no_grad()
@pytest.mark.parametrize("head", ["clip", "kme", "prolip", "flair"])
def test_the_task_measures_each_image_with_its_first_caption(head, tmp_path):
    model, encoder, dataset = model_of(head), batch_encoder(), gallery()
    evaluation, task = Evaluation(model, encoder, 1, tmp_path), Diagnosis("pca", 0)
    (view,) = task.views(evaluation, dataset)
    columns = {view: compute(evaluation, dataset, view, task.columns(evaluation, dataset))}
    metrics = task.measure(evaluation, dataset, columns)
    firsts = [list(dataset.caption_image).index(image) for image in range(len(dataset.images))]
    (images,) = (view["image.0"] for view in columns.values())
    (captions,) = encoder.embed_captions(model, [dataset.captions[row] for row in firsts], 1)
    vectors = {
        "clip": lambda part: part,
        "kme": lambda part: (part.log_weights.exp()[:, :, None] * part.points).sum(1),
        "prolip": lambda part: part[:, : part.shape[1] // 2],
        "flair": lambda part: part.points[:, 0],
    }[head]
    expected, arrays = diagnose(vectors(images), vectors(captions))
    for protocol, values in expected.items():
        assert metrics[protocol] == pytest.approx(values, rel=1e-9, abs=1e-9)
    stored = read_arrays(tmp_path / "diagnosis" / "things.npz")
    assert stored["map"].shape == (2, 13, 2) and stored.keys() == {"map", *arrays}


def test_only_pairs_are_diagnosed_and_no_number_is_better_than_another():
    with pytest.raises(ConfigError, match="colours has not two images with captions"):
        Diagnosis("pca", 0).check(classes())
    key = MetricKey.parse("diagnosis/things/image/effective_rank")
    assert not key.is_ranked and key.decimals == 4 and not key.lower_is_better
    assert MetricKey.parse("calibration/things/ece").lower_is_better


def diagnose_on_a_rank() -> dict[str, object]:
    metrics, arrays = diagnose(*pairs(1300), World.from_process_group())
    return metrics | {name: values.tolist() for name, values in arrays.items()}


@pytest.mark.medium
def test_two_ranks_give_the_numbers_of_one():
    metrics, arrays = diagnose(*pairs(1300))
    expected = metrics | {name: values.tolist() for name, values in arrays.items()}
    assert run_ranks(2, diagnose_on_a_rank) == [expected] * 2
