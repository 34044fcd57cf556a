"""Teachers: frozen models, averages of the student, ensembles, and stored embeddings."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clipzoo.build import build_model
from clipzoo.distillation import ClipKD, OpenClipDistillation
from clipzoo.encoders.tuning import Tuning
from clipzoo.errors import ConfigError
from clipzoo.model import Model
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.teachers import Ensemble, FrozenTeacher
from clipzoo.training.averaging import AverageTeacher, ExponentialAverage
from clipzoo.training.gradients import GradientCache
from clipzoo.types import World
from tests.support import tuned
from tests.support.tuned import frozen, state, train

DISTILL = OpenClipDistillation(0.5)


def model(seed: int = 0, **encoder: object) -> Model:
    config = {**tuned.configuration(), "seed": seed}
    config["encoder"] |= encoder
    return build_model(config)


def trained(student: Model, teacher: object, what: Tuning | None = None, steps: int = 4, **changes):
    return train(student, what, steps, teacher=teacher, distill=DISTILL, **changes)


def distilled(result) -> list[float]:
    return [row["term_distill"] for row in result.history]


def test_the_term_of_a_teacher_equal_to_the_student_is_the_entropy_of_its_softmax():
    student = model().double()
    scores = student(tuned.batch()).image_to_text.dense()
    entropies = [torch.distributions.Categorical(logits=matrix).entropy().mean() for matrix in (scores, scores.mT)]
    entropies = [entropy.detach() for entropy in entropies]
    row = trained(copy.deepcopy(student), FrozenTeacher(copy.deepcopy(student)), steps=1).history[0]
    assert row["term_distill"] == pytest.approx(float(sum(entropies)) / 2, rel=1e-12)
    alone = train(student, None, 1).history[0]["loss"]
    assert row["loss"] == pytest.approx(alone + 0.5 * row["term_distill"], rel=1e-12)


def test_micro_batches_and_cached_features_change_no_loss_and_the_teacher_stays_as_it_was(tmp_path):
    teacher = model(1).double()
    before = state(teacher)
    whole = trained(model(), FrozenTeacher(teacher), steps=12)
    parts = trained(model(), FrozenTeacher(teacher), steps=12, micro_batch=3)
    cached = FrozenTeacher(teacher, cache_gigabytes=1.0)
    stored = trained(model(), cached, steps=12, folder=tmp_path)
    assert cached.readers[0].keys() == {"image", "text"}
    both = trained(model(), FrozenTeacher(teacher, 1.0), tuned.tuning(frozen(), None), 12, folder=tmp_path / "both")
    plain = trained(model(), FrozenTeacher(teacher), tuned.tuning(frozen(0.0), None), 12)
    for one, other in ((parts, whole), (stored, whole), (both, plain)):
        assert distilled(one) == pytest.approx(distilled(other), rel=1e-11)
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    saved = torch.load(next((tmp_path / "checkpoints").glob("*.pt")), weights_only=True)
    assert "teacher" not in json.dumps(list(saved)) and not (tmp_path / "features").exists()


def test_until_the_average_begins_the_teacher_is_the_student_and_then_its_averaged_weights():
    student = model().double()
    average = ExponentialAverage(None, 2.0, None)
    result = trained(student, AverageTeacher(), averaging=average, steps=3)
    reference = model().double()
    first = trained(reference, FrozenTeacher(copy.deepcopy(reference)), steps=1)
    # After one step the average is the student itself.
    second = trained(copy.deepcopy(reference), FrozenTeacher(copy.deepcopy(reference)), steps=1)
    assert distilled(result)[0] == pytest.approx(distilled(first)[0], rel=1e-12)
    assert len({*distilled(result)}) == 3 and second is not None


def test_a_teacher_draws_no_random_numbers_and_leaves_the_students_dropout_on():
    torch.manual_seed(0)
    student = build_model(tuned.configuration(tuned.RESNET)).double()
    student.train()
    cache = GradientCache(student, InfoNCE(0.5, 0.5), World())
    modes = [module.training for module in student.modules()]
    teacher = AverageTeacher()
    parts = None
    teacher.begin(parts, cache, None, None)
    before = torch.get_rng_state()
    teacher([tuned.batch()], {})
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in student.modules()] == modes


def test_an_ensemble_is_a_chain_of_teachers():
    teachers = [model(1), model(2)]
    one = trained(model(), FrozenTeacher(teachers[0]), steps=1)
    two = trained(model(), FrozenTeacher(teachers[1]), steps=1)
    both = trained(model(), Ensemble([FrozenTeacher(teacher) for teacher in teachers]), steps=1)
    assert distilled(both)[0] == pytest.approx((distilled(one)[0] + distilled(two)[0]) / 2, rel=1e-11)


def test_learned_maps_train_with_the_model_and_a_resumed_run_has_them(tmp_path):
    def run(folder: Path, steps: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        distill = ClipKD(16, 16, 1.0, 10.0, 1.0, 10.0)
        distill.image_map, distill.text_map = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        before = {name: value.clone().double() for name, value in distill.state_dict().items()}
        train(model(), None, steps, teacher=FrozenTeacher(model(1)), distill=distill, folder=folder, save_every=2)
        assert not any(torch.equal(before[name], value) for name, value in distill.state_dict().items())
        return distill.state_dict()

    run(tmp_path / "resumed", 4)
    whole = run(tmp_path / "whole", 4)
    checkpoint = torch.load(tmp_path / "whole" / "checkpoints" / "step_00000004.pt", weights_only=True)
    assert all(torch.equal(checkpoint["distill"][name], value) for name, value in whole.items())


def test_images_are_resized_and_captions_cut_for_a_teacher_of_other_sizes():
    student = model()
    teacher = FrozenTeacher(model(1))
    teacher.open(None, student)
    teacher.model.encoder.image_size = 24
    teacher.model.encoder.context_length = 8
    batch = tuned.batch()
    converted = teacher._converted(replace(batch, text_length=torch.full((8,), 10)))
    assert converted.image.shape == (8, 3, 24, 24) and converted.image.dtype == torch.uint8
    assert torch.equal(converted.text[:, :7], batch.text[:, :7]) and (converted.text[:, 7] == 49407).all()
    assert (converted.text_length == 8).all() and student is not None


class OtherTokenizer:
    context_length, end_token = 16, 1

    def __call__(self, captions: list[str]) -> torch.Tensor:
        return torch.ones(len(captions), 16, dtype=torch.int64)


def test_parts_that_do_not_fit_are_refused():
    teacher = model(1)
    teacher.encoder.tokenizer = OtherTokenizer()
    with pytest.raises(ConfigError, match="teacher has another tokenizer than the student: '' is .* clipzoo features"):
        trained(model(), FrozenTeacher(teacher))
    with pytest.raises(ConfigError, match="distillation open_clip compares the model with a teacher: give teacher=run"):
        trained(model(), None)
    with pytest.raises(ConfigError, match="no part of the loss reads the teacher: give distill=open_clip"):
        train(model(), None, 1, teacher=FrozenTeacher(model(1)))
    with pytest.raises(ConfigError, match="give average=ema"):
        trained(model(), AverageTeacher())
    with pytest.raises(ConfigError, match="give distill.teacher_width=16"):
        train(model(), None, 1, teacher=FrozenTeacher(model(1)), distill=ClipKD(16, 8, 0.0, 1.0, 0.0, 1.0))
