"""Teachers: frozen models, averages of the student, ensembles, and stored embeddings."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import clipzoo
from clipzoo.build import build_model
from clipzoo.cli import __main__ as commands
from clipzoo.config.compose import compose
from clipzoo.data.dataset import ShardDataset
from clipzoo.data.maps.engines import UnfinishedError
from clipzoo.distillation import ClipKD, DataCompDR, OpenClipDistillation
from clipzoo.encoders.tuning import Tuning
from clipzoo.errors import ConfigError
from clipzoo.exports.hub import export
from clipzoo.exports.open_clip import write_open_clip
from clipzoo.exports.transformers import write_transformers
from clipzoo.heads.pairs import Scope
from clipzoo.loading import LoadedModel
from clipzoo.model import Model
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.runs.directory import with_digests
from clipzoo.runs.identity import identity
from clipzoo.teachers import Ensemble, FrozenTeacher, LoadedTeacher, StoredTeacher, write_features
from clipzoo.training.averaging import AverageTeacher, ExponentialAverage
from clipzoo.training.gradients import GradientCache
from clipzoo.training.optimizers import SGD
from clipzoo.training.schedules import Constant
from clipzoo.training.settings import Computation
from clipzoo.types import Progress, Views, World
from tests.support import runs, tuned
from tests.support.experiments import composed_once
from tests.support.paths import ROOT
from tests.support.processes import run_script
from tests.support.ranks import run_ranks
from tests.support.shards import picture, shard_data, write_shard
from tests.support.tuned import frozen, pairs, state, train

DISTILL = OpenClipDistillation(0.5)
GRADIENT_DESCENT = SGD(0.0, False, weight_decay=0.0, schedule=Constant(0.1, 0.0, 0.0, None, 0, None, False))
"""AdamW's first steps would enlarge the rounding errors of sums over ranks."""


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
    assert cached._caches.keys() == {"image", "text"}
    both = trained(model(), FrozenTeacher(teacher, 1.0), tuned.tuning(frozen(), None), 12, folder=tmp_path / "both")
    plain = trained(model(), FrozenTeacher(teacher), tuned.tuning(frozen(0.0), None), 12)
    for one, other in ((parts, whole), (stored, whole), (both, plain)):
        assert distilled(one) == pytest.approx(distilled(other), rel=1e-11)
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    saved = torch.load(next((tmp_path / "checkpoints").glob("*.pt")), weights_only=True)
    assert "teacher" not in json.dumps(list(saved)) and not (tmp_path / "features").exists()


def test_the_teacher_of_a_step_is_the_average_before_the_step_and_at_first_the_student(tmp_path):
    average = ExponentialAverage(None, 2.0, None)
    arguments = {"averaging": average, "optimizer": GRADIENT_DESCENT}
    result = trained(model(), AverageTeacher(), steps=3, **arguments)
    trained(model(), AverageTeacher(), steps=2, folder=tmp_path, **arguments)
    saved = torch.load(tmp_path / "checkpoints" / "step_00000002.pt", weights_only=True)
    assert not torch.equal(saved["model"]["head.log_scale"], saved["average"]["model"]["head.log_scale"])
    student, teacher = model().double(), model().double()
    student.load_state_dict(saved["model"])
    teacher.load_state_dict({**saved["model"], **saved["average"]["model"]})
    order = {"seed": 0, "global_batch": tuned.BATCH, "world": World(), "trim_text": False}
    batch = next(pairs().batches(start_step=2, stop_step=3, **order))
    similarity = replace(student(batch), teacher=teacher(batch))
    term = DISTILL.terms(similarity, batch, Progress(2, 3, tuned.SAMPLES, tuned.BATCH))["distill"]
    assert distilled(result)[2] == pytest.approx(float(term.value.detach()), rel=1e-11)
    first = trained(model(), FrozenTeacher(model()), steps=1)
    assert distilled(result)[0] == pytest.approx(distilled(first)[0], rel=1e-12)


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
    teacher([tuned.batch()], {}, Scope())
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in student.modules()] == modes


def test_the_average_as_teacher_leaves_the_random_features_of_the_step():
    sizes = ("head.features=16", "head.evaluation_features=32")
    student = build_model(composed_once("data.shards=none.tar", "encoder=tiny", "head=wpse", *sizes)).double()
    student.train().head.resample(3)
    frequencies = student.head.frequencies.clone()
    teacher = AverageTeacher()
    teacher.begin(None, GradientCache(student, InfoNCE(0.5, 0.5), World()), None, None)
    teacher([tuned.batch()], {}, Scope())
    assert torch.equal(student.head.frequencies, frequencies)


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


@pytest.mark.medium
@pytest.mark.parametrize(("library", "write"), [("open_clip", write_open_clip), ("transformers", write_transformers)])
def test_models_of_other_libraries_teach_as_the_model_that_they_were_exported_from(tmp_path, library, write):
    write(loaded(1), tmp_path)
    name = f"local-dir:{tmp_path}" if library == "open_clip" else str(tmp_path)
    teacher = LoadedTeacher(library, name, 0.0)
    expected = trained(model(), FrozenTeacher(loaded(1)), steps=2)
    assert distilled(trained(model(), teacher, steps=2)) == pytest.approx(distilled(expected), rel=1e-6)


def test_the_digest_of_its_weights_identifies_a_teacher_wherever_it_is(tmp_path):
    def identity_of(*changes: str) -> dict[str, object]:
        return identity(with_digests(compose(["data.shards=a.tar", "distill=open_clip", *changes])))

    for name in ("one", "two", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "features.json").write_text("{}" if name != "other" else "{ }")
    one, two, other = (
        identity_of("teacher=stored", f"teacher.path={tmp_path / name}") for name in ("one", "two", "other")
    )
    assert one == two != other and one["teacher.digest"] != other["teacher.digest"]
    with pytest.raises(ConfigError, match="teacher.path=nothing has no features.json: make it with clipzoo features"):
        identity_of("teacher=stored", "teacher.path=nothing")
    with pytest.raises(ConfigError, match="teacher.path=nothing does not exist"):
        identity_of("teacher=run", "teacher.path=nothing")
    nodes = "[{_target_: clipzoo.teachers.StoredTeacher, path: " + str(tmp_path / "one") + "}]"
    ensemble = identity_of("teacher=ensemble", f"teacher.teachers={nodes}")
    assert ensemble["teacher.teachers"][0]["digest"] == one["teacher.digest"]
    named = identity_of("teacher=open_clip", "teacher.path=ViT-B-32/laion2b_s34b_b79k")
    assert named["teacher.digest"] == "open_clip:ViT-B-32/laion2b_s34b_b79k"


KINDS = {
    "frozen": lambda: (FrozenTeacher(model(1)), None),
    "average": lambda: (AverageTeacher(), ExponentialAverage(None, 2.0, None)),
}


def trained_on_rank(kind: str, parallel: str = "ddp") -> dict[str, torch.Tensor]:
    teacher, average = KINDS[kind]()
    torch.manual_seed(0)
    distill = ClipKD(16, 16, 1.0, 10.0, 1.0, 10.0)
    distill.image_map, distill.text_map = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
    computation = Computation(precision="float64", parallel=parallel, micro_batch=2)
    student = model().double()
    world = World.from_process_group() if torch.distributed.is_initialized() else World()
    arguments = {"teacher": teacher, "averaging": average, "distill": distill, "computation": computation}
    train(
        student,
        None,
        4,
        world=world,
        optimizer=GRADIENT_DESCENT,
        **arguments,
    )
    return {**student.state_dict(), **distill.state_dict()}


@pytest.mark.medium
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one(kind):
    expected = trained_on_rank(kind)
    for weights in run_ranks(2, trained_on_rank, kind):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_divide_the_weights_have_the_same_teacher(kind):
    expected = trained_on_rank(kind)
    for name, value in run_ranks(2, trained_on_rank, kind, "fsdp")[0].items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12, msg=name)


# Stored features.


def squares(folder: Path, count: int = 12) -> Path:
    """Write two shards of images of the model's size, so that no crop changes them, with two captions each."""
    for shard in range(2):
        samples = []
        for number in range(shard * count, (shard + 1) * count):
            captions = [f"a red picture number {number}", f"picture {number}, blue"]
            content = {"png": picture(number, (32, 32)), "json": json.dumps({"caption": captions}).encode()}
            samples.append((f"{number:06d}", content))
        write_shard(folder / f"{shard:05d}.tar", samples)
    return folder


def dataset(folder: Path, **changes: object) -> ShardDataset:
    settings = {"tokenizer": model().encoder.tokenizer, "image_size": 32, "crop_scale": [1.0, 1.0]}
    data = shard_data(folder, **{**settings, "caption_key": "caption", **changes})
    data.open(None, World())
    return data


def loaded(seed: int) -> LoadedModel:
    config = {**tuned.configuration(), "seed": seed}
    return LoadedModel(build_model(config), config).eval()


@pytest.mark.parametrize("captions", [1, 2])
def test_stored_features_give_the_terms_of_their_model(tmp_path, captions):
    data = dataset(squares(tmp_path / "shards"), views=Views(captions=captions))
    teacher = loaded(1)
    assert write_features((lambda: (teacher, data),), "runs/teacher", tmp_path / "features", batch=5) == (2, 24)

    def terms(teacher) -> list[float]:
        distill = DataCompDR(0.5)
        computation = Computation(precision="float32", tile=None)
        result = clipzoo.train(
            model(), InfoNCE(0.5, 0.5), data, batch=8, steps=5, device="cpu", quiet=True, log_every=1, teacher=teacher,
            distill=distill, computation=computation,
        )  # fmt: skip
        return distilled(result)

    stored = terms(StoredTeacher(str(tmp_path / "features")))
    assert stored == pytest.approx(terms(FrozenTeacher(teacher)), rel=2e-6)


def test_the_page_of_the_shards_shows_the_pairs_that_stored_features_call_most_and_least_similar(tmp_path):
    data, teacher, folder = dataset(squares(tmp_path / "shards")), loaded(1), tmp_path / "features"
    write_features((lambda: (teacher, data),), "runs/teacher", folder, batch=5)
    images, captions = zip(*data.whole(range(data.samples)), strict=True)
    with torch.no_grad():
        embeddings = teacher.encode_image(list(images)), teacher.encode_text([texts[0] for texts in captions])
        expected = teacher.head.score(*embeddings).diagonal()
    stored = StoredTeacher(str(folder))
    stored.load(data.shards())
    scores = torch.from_numpy(stored.pair_scores())
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    words = ["look", str(tmp_path / "shards"), "--caption-key", "caption", "--features", str(folder), "--on", "local:1"]
    options = commands._parser().parse_args(["shards", *words])
    options.run(options)
    page = (tmp_path / "shards" / "clipzoo_look" / "index.html").read_text()
    most, least = page.index("Most similar pairs</h2>"), page.index("Least similar pairs</h2>")
    assert f"similarity {scores.max():.3g}<" in page[most : most + 2000 + page[most:].index("similarity")]
    assert f"similarity {scores.min():.3g}<" in page[least : least + 2000 + page[least:].index("similarity")]


def test_features_continue_after_an_interruption_and_follow_moved_shards(tmp_path):
    folder, teacher = tmp_path / "features", loaded(1)
    data = dataset(squares(tmp_path / "shards"))
    seen: list[tuple[int, int]] = []
    write_features((lambda: (teacher, data),), "a", folder, batch=5, report=lambda *counts: seen.append(counts))
    assert seen == [(1, 2), (2, 2)]
    files = sorted((folder / "embeddings").glob("[0-9a-f]*.safetensors"))
    files = [file for file in files if file.stem != "head"]
    content = files[0].read_bytes()
    files[0].unlink()
    with pytest.raises(ConfigError, match="has no features of 1 of 2 shards of data.shards, 0000.*clipzoo features a"):
        StoredTeacher(str(folder)).open(SimpleNamespace(dataset=data), model())
    assert (
        write_features((lambda: (teacher, data),), "a", folder, batch=5) == (1, 24) and files[0].read_bytes() == content
    )
    (tmp_path / "shards").rename(tmp_path / "moved")
    assert write_features((lambda: (teacher, dataset(tmp_path / "moved")),), "a", folder) == (0, 24)
    with pytest.raises(ConfigError, match="has features of another model or other settings: give another --output"):
        write_features((lambda: (loaded(2), data),), "b", folder)
    with pytest.raises(ConfigError, match="has no features of this dataset"):
        StoredTeacher(str(folder)).open(SimpleNamespace(dataset=pairs()), model())
    files[0].write_bytes(files[1].read_bytes()[:-8])
    teacher_of_features = StoredTeacher(str(folder))
    teacher_of_features.open(SimpleNamespace(dataset=dataset(tmp_path / "moved")), model())
    with pytest.raises(ConfigError, match="safetensors"):
        for number in range(2):
            teacher_of_features._shard(number)


def embedded(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("embeddings/*.safetensors")}


def test_processes_that_share_the_shards_write_the_features_of_one(tmp_path, monkeypatch):
    data, teacher = dataset(squares(tmp_path / "shards")), loaded(1)
    write_features((lambda: (teacher, data),), "a", tmp_path / "one", batch=5)
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    for name, value in (("JOB_ID", "7"), ("STEP_NUM_TASKS", "2"), ("PROCID", "0")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(UnfinishedError, match="--on slurm: other processes have not finished"):
        write_features((lambda: (teacher, data),), "a", tmp_path / "two", "slurm", batch=5)
    assert embedded(tmp_path / "two").items() < embedded(tmp_path / "one").items()
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert write_features((lambda: (teacher, data),), "a", tmp_path / "two", "slurm", batch=5) == (1, 24)
    assert embedded(tmp_path / "two") == embedded(tmp_path / "one")


@pytest.mark.slow
def test_features_of_processes_that_are_killed_equal_those_of_one_process(tmp_path):
    export(loaded(1), tmp_path / "model", "hub")
    squares(tmp_path / "shards")
    for shard in range(2, 12):
        content = (tmp_path / "shards" / f"{shard % 2:05d}.tar").read_bytes()
        (tmp_path / "shards" / f"{shard:05d}.tar").write_bytes(content.replace(b"picture", b"pic%04d" % shard))
    command = [sys.executable, "-m", "clipzoo.cli", "features", tmp_path / "model", f"data.shards={tmp_path}/shards",
               "data.caption_key=caption", "data.workers=0", "--device", "cpu", "--on"]  # fmt: skip
    subprocess.run([*command, "local:1", "--output", tmp_path / "one"], cwd=ROOT, check=True)
    assert len(embedded(tmp_path / "one")) == 13
    killed = subprocess.Popen([*command, "local:2", "--output", tmp_path / "two"], cwd=ROOT, start_new_session=True)
    while len(embedded(tmp_path / "two")) < 3:
        assert killed.poll() is None
        time.sleep(0.005)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert embedded(tmp_path / "two").items() < embedded(tmp_path / "one").items()
    subprocess.run([*command, "local:2", "--output", tmp_path / "two"], cwd=ROOT, check=True)
    assert embedded(tmp_path / "two") == embedded(tmp_path / "one")


RUNS = {
    "run": ("teacher=run", "distill=open_clip"),
    "average": ("teacher=average", "average=ema", "average.half_life_steps=2", "distill=open_clip"),
    "stored": ("teacher=stored", "distill=clip_kd", "distill.width=16", "distill.teacher_width=512"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_a_killed_run_with_a_teacher_equals_an_uninterrupted_one(tiny_shards, undisturbed, tmp_path, kind):
    changes = [*RUNS[kind], "head.embed_width=16"]
    if kind == "run":
        changes.append(f"teacher.path={undisturbed / 'run'}")
    if kind == "stored":
        changes.append(f"teacher.path={tmp_path / 'features'}")
        run_script(
            "clipzoo/cli/__main__.py", "features", undisturbed / "run", f"data.shards={tiny_shards}", "data.workers=0",
            "--output", tmp_path / "features", "--device", "cpu", log=tmp_path / "features_log",
        )  # fmt: skip
    runs.train(tiny_shards, tmp_path / "whole", *changes)
    runs.train_and_kill(tiny_shards, tmp_path / "killed", 5, *changes)
    runs.train(tiny_shards, tmp_path / "killed", *changes)
    runs.assert_same_training(tmp_path / "killed", tmp_path / "whole")
    state = runs.newest_state(tmp_path / "whole")
    assert "teacher" not in state and ("distill" in state) == (kind == "stored")
