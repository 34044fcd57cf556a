"""Zero-shot and retrieval compared with CLIP_benchmark's and open_clip's evaluators: all numbers, and the time.

    python scripts/benchmark.py evaluation --run runs/demo
    python scripts/benchmark.py evaluation --run runs/demo --encoder bench_vit --rounds 5

    python scripts/benchmark.py evaluation --parts suite classifier --rounds 3

Agreement: the trained run on the sets on disk, in float64; the peers' code gets the same model through its interface.
The compared numbers are counts of right answers, so equal means equal. Speed: an untrained model of --encoder in
clipzoo and in open_clip with the same weights, float32, one thread; the programs read the same tars with as many
workers, in turn, each in its own process. The times are those of calls with Python values: neither our composition of
a configuration nor the peers' command lines count. The peers need numpy < 2.4 (their accuracy() fails with newer ones);
it is put into build/peer_evaluation, apart from the environment.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from benchmarks import ROOT, built, install, log, medians, publish
from clipzoo.cli.arguments import Parser, number_in
from clipzoo.config.vocabulary import NonNegativeCount

PEER = ROOT / "build" / "peer_evaluation"
PACKAGES = ("clip-benchmark==1.6.2", "numpy<2.4")
CUTOFFS = (1, 5, 10)
SETS = 13
SETS_OF_THE_DEMO = ["shapes", "colours", "counts", "textures", "scenes", "scenes_composition"]
Numbers = dict[str, float]
PARTS = ("agreement", "speed", "suite", "classifier")
"""suite: zero-shot and linear probe on the sets, thirteen by repetition, without and with validation splits.
classifier: that of ImageNet, 1000 x 80 prompts."""


SHARED = {"batch": 64, "workers": 1, "encoder": "bench_vit"}


def add_options(parser: Parser) -> None:
    parser.add_argument("--run", type=Path, default=Path("runs/demo"), help="a trained run; default: %(default)s")
    parser.add_argument("--root", type=Path, default=Path("data/demo/downstream"), help="default: %(default)s")
    parser.add_argument("--sets", nargs="+", default=SETS_OF_THE_DEMO)
    parser.add_argument("--rounds", type=number_in(NonNegativeCount), default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["agreement", "speed"])


def main(options: argparse.Namespace) -> None:
    install(PEER, PACKAGES)
    # Before anything imports numpy.
    sys.path.insert(0, str(PEER))
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    result: dict[str, Any] = {"encoder": options.encoder, "batch": options.batch}
    races = {"speed": race, "suite": race_suite, "classifier": race_classifier}
    with TemporaryDirectory() as scratch:
        if "agreement" in options.parts:
            result["agreement"] = {name: agree(options, name, Path(scratch)) for name in options.sets}
        for part in races.keys() & set(options.parts) if options.rounds else ():
            result[part] = races[part](options, Path(scratch) / part)
    publish(options, result)
    differing = sum(numbers["differing"] for numbers in result.get("agreement", {}).values())
    sys.exit(f"{differing} numbers differ" if differing else 0)


def agree(options: argparse.Namespace, name: str, scratch: Path) -> dict[str, Any]:
    """Every number of the three programs in percent, for the run's model in float64."""
    import clipzoo

    model = clipzoo.load(options.run).double()
    folder = _without_shared_captions(options.root, name, scratch)
    peer = Behind(model)
    ours = _ours(model, _configured(model, folder, options))
    peers = {"CLIP_benchmark": _clip_benchmark(peer, folder, model.transform, model.tokenizer, options)}
    if _kind(folder) != "choice":
        peers["open_clip"] = _open_clip(peer, folder, model.transform, model.tokenizer, options)
    # The peers' numbers are float32 means of zeros and ones.
    differences = [abs(value - ours[key]) for numbers in peers.values() for key, value in numbers.items()]
    compared, differing = len(differences), sum(difference > 1e-4 for difference in differences)
    log(f"{name}: {compared} numbers compared, {differing} differ")
    return {"clipzoo": ours, **peers, "compared": compared, "differing": differing}


def _without_shared_captions(root: Path, name: str, scratch: Path) -> Path:
    """Return the dataset's folder; for retrieval, a copy without pictures that share a caption. Shared captions tie:
    the peers' sorting breaks ties at random, ours by the order of the dataset."""
    import io

    from clipzoo.evaluation.datasets.tar import open_tar_dataset, write_retrieval

    data: Any = open_tar_dataset(root, name)
    if not hasattr(data, "caption_image"):
        return root / name
    owners: dict[str, set[int]] = {}
    owner_captions: dict[int, list[str]] = {}
    for caption, owner in zip(data.captions, data.caption_image, strict=True):
        owners.setdefault(caption, set()).add(owner)
        owner_captions.setdefault(owner, []).append(caption)

    def examples() -> Iterator[tuple[bytes, list[str]]]:
        for index, captions in owner_captions.items():
            if all(len(owners[caption]) == 1 for caption in captions):
                stream = io.BytesIO()
                data.images[index].save(stream, "PNG")
                yield stream.getvalue(), captions

    write_retrieval(scratch / name, recipe="no caption of two pictures", examples=examples())
    return scratch / name


def race(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Wall seconds of every program on every set, in turn."""
    model, peer, transform, tokenizer = untrained(options, scratch)
    sets = [name for name in options.sets if _kind(options.root / name) != "choice"]
    configured = {name: _configured(model, options.root / name, options) for name in sets}
    programs: dict[str, Callable[[str], Any]] = {
        "clipzoo": lambda name: _ours(model, configured[name]),
        "CLIP_benchmark": lambda name: _clip_benchmark(peer, options.root / name, transform, tokenizer, options),
        "open_clip": lambda name: _open_clip(peer, options.root / name, transform, tokenizer, options),
    }
    pairs = [(program, name) for name in sets for program in programs]
    by_set: dict[str, dict[str, Callable[[], Any]]] = {
        name: {p: partial(programs[p], n) for p, n in pairs if n == name} for name in sets
    }
    return _compared(by_set, options)


def race_suite(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Zero-shot and linear probe on thirteen sets: the sets with classes again and again, under other names.

    "suite": without a validation split CLIP_benchmark trains one probe, ours searches C on a fifth of train.
    "searched": the same images with that fifth as their validation split, so that both search. CLIP_benchmark tries 19
    weight decays, with ten epochs of AdamW each, on normalised features; ours 20 to 30 values of C before the
    projection and as many behind it. CLIP_benchmark's probe refuses to run on a CPU; here it gets the CPU under the
    name of a GPU.
    """
    model, peer, transform, tokenizer = untrained(options, scratch)
    classes = [name for name in options.sets if (options.root / name / "classnames.txt").exists()]
    roots = {"suite": options.root, "searched": scratch / "validated"}
    for name in classes:
        _with_validation(options.root / name, roots["searched"] / name)
    names = [f"set{number}" for number in range(SETS)]
    for case, root in roots.items():
        (scratch / case).mkdir()
        for number, name in enumerate(names):
            (scratch / case / name).symlink_to((root / classes[number % len(classes)]).resolve())
    tasks = ("zero_shot", "linear_probe")
    configured = {case: _configured(model, scratch / case / names[0], options, tasks, names) for case in roots}

    def peers(case: str) -> None:
        for name in names:
            _clip_benchmark(peer, scratch / case / name, transform, tokenizer, options)
            _clip_benchmark_probe(peer, scratch / case / name, transform, options)

    contenders: dict[str, dict[str, Callable[[], Any]]] = {
        case: {"clipzoo": partial(_ours, model, configured[case]), "CLIP_benchmark": partial(peers, case)}
        for case in roots
    }
    return {
        **_compared(contenders, options),
        "sets": {name: classes[i % len(classes)] for i, name in enumerate(names)},
    }


def _with_validation(source: Path, target: Path) -> None:
    """Write a set again with a random fifth of train as its validation split."""
    import io

    import numpy as np

    from clipzoo.evaluation.datasets.tar import open_tar_dataset, write_classification

    data: Any = open_tar_dataset(source.parent, source.name)

    def rows(split: str, indices: Any) -> Iterator[tuple[bytes, int]]:
        for index in indices.tolist():
            picture, label = data.splits[split][index]
            stream = io.BytesIO()
            picture.save(stream, "PNG")
            yield stream.getvalue(), label

    count = len(data.splits["train"])
    validation, train = np.split(np.random.default_rng(0).permutation(count), [count // 5])
    parts = {"train": train, "val": validation, "test": np.arange(len(data.splits["test"]))}
    write_classification(
        target, class_names=data.class_names, templates=data.templates, metric=data.metric,
        recipe="a random fifth of train is validation",
        splits={split: rows("test" if split == "test" else "train", indices) for split, indices in parts.items()},
    )  # fmt: skip


def race_classifier(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The classifier of ImageNet's 1000 classes and 80 templates, without images."""
    import open_clip
    import torch
    from clip_benchmark.metrics.zeroshot_classification import zero_shot_classifier

    from clipzoo.evaluation.encoder import BatchEncoder
    from clipzoo.evaluation.zero_shot import build_classifiers

    model, peer, _, tokenizer = untrained(options, scratch)
    names, templates = open_clip.IMAGENET_CLASSNAMES, open_clip.OPENAI_IMAGENET_TEMPLATES
    lines = [template("{c}") for template in templates]
    encoder = BatchEncoder(model.tokenizer, model.config["encoder"]["image_size"], "bicubic", 256, 0, "float32")

    def ours() -> Any:
        (classifier,) = build_classifiers(model, names, lines, encoder, draws=1)
        assert isinstance(classifier, torch.Tensor)
        return classifier.numpy()

    contenders: dict[str, Callable[[], Any]] = {
        "clipzoo": ours,
        "CLIP_benchmark": lambda: zero_shot_classifier(peer, tokenizer, names, lines, "cpu", amp=False).mT.numpy(),
        "open_clip": lambda: open_clip.build_zero_shot_classifier(peer, tokenizer, names, templates, use_tqdm=False),
    }
    result = _compared({"classifier": contenders}, options)
    classifier, peers_classifier, _ = result.pop("returned")["classifier"].values()
    return {**result, "largest_difference": float(abs(classifier - peers_classifier).max())}


def untrained(options: argparse.Namespace, scratch: Path) -> tuple[Any, Any, Any, Any]:
    """An untrained model, the same weights as open_clip's model, and its transform and tokenizer."""
    import open_clip

    import clipzoo

    new, _, plain = built(f"encoder={options.encoder}", "head=clip")
    model = clipzoo.LoadedModel(new, plain).eval()
    clipzoo.export(model, scratch)
    peer, _, transform = open_clip.create_model_and_transforms(f"local-dir:{scratch}")
    return model, peer.eval(), transform, open_clip.get_tokenizer(f"local-dir:{scratch}")


def _compared(contenders: Mapping[str, Mapping[str, Callable[[], Any]]], options: argparse.Namespace) -> dict[str, Any]:
    """Wall and CPU seconds of all programs by case, in turn, with the medians' ratios to ours; the last return values.

    Each program has a process, so that none works in memory that another one has left behind.
    """
    wall: dict[str, dict[str, list[float]]] = {case: {program: [] for program in by} for case, by in contenders.items()}
    cpu: dict[str, dict[str, list[float]]] = {case: {program: [] for program in by} for case, by in contenders.items()}
    returned: dict[str, dict[str, Any]] = {case: {} for case in contenders}
    fork, pipes = multiprocessing.get_context("fork"), {}
    for program in next(iter(contenders.values())):
        pipes[program], far_end = fork.Pipe()
        fork.Process(target=_serve, args=(far_end, {case: by[program] for case, by in contenders.items()})).start()
        far_end.close()
    try:
        for turn in range(options.rounds):
            for case, by_program in contenders.items():
                for program in by_program:
                    pipes[program].send(case)
                    seconds, cpu_seconds, returned[case][program] = pipes[program].recv()
                    wall[case][program].append(seconds)
                    cpu[case][program].append(cpu_seconds)
                log(f"round {turn + 1}, {case}:", {program: round(part[-1], 2) for program, part in cpu[case].items()})
    finally:
        for pipe in pipes.values():
            with suppress(BrokenPipeError):
                pipe.send(None)
    result: dict[str, Any] = {"returned": returned}
    for unit, seconds_by_case in (("seconds", wall), ("cpu_seconds", cpu)):
        middle = {case: medians(by) for case, by in seconds_by_case.items()}
        ratios = {
            c: {p: value / by["clipzoo"] for p, value in by.items() if p != "clipzoo"} for c, by in middle.items()
        }
        result[unit] = {"readings": seconds_by_case, "medians": middle, "times_as_fast": ratios}
    return result


def _serve(pipe: Any, runs: Mapping[str, Callable[[], Any]]) -> None:
    """In a program's process: run the cases that are asked for -> wall and CPU seconds, and the return value."""
    for case in iter(pipe.recv, None):
        before, begin = sum(os.times()[:4]), time.perf_counter()
        value = runs[case]()
        pipe.send((time.perf_counter() - begin, sum(os.times()[:4]) - before, value))


class Behind:
    """A model of ours as the peers call models."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def encode_image(self, images: Any) -> Any:
        return self._model.encode_image(images)

    def encode_text(self, tokens: Any, normalize: bool = True) -> Any:
        return self._model.encode_text(tokens)

    def __call__(self, image: Any) -> dict[str, Any]:
        return {"image_features": self.encode_image(image)}


def _configured(
    model: Any, folder: Path, options: argparse.Namespace, tasks: Sequence[str] = (), names: Sequence[str] = ()
) -> Any:
    """Configuration of the suite on one dataset.

    tasks: by default zero_shot, or retrieval for a dataset with captions, and choice for one with examples. names:
    datasets beside the folder, instead of it.
    """
    from clipzoo.config.compose import compose

    kind = _kind(folder)
    tasks = tasks or [kind if kind in ("retrieval", "choice") else "zero_shot"]
    lists = [f"eval.{task}=[{','.join(names or [folder.name])}]" for task in tasks]
    sizes = [f"eval.batch_size={options.batch}", f"eval.workers={options.workers}"]
    words = ["eval=none", f"eval.root={folder.parent}", "eval.paired=true", "eval.prompts=set", *lists, *sizes]
    return compose(words, "eval", nodes={"encoder": model.config["encoder"]})["eval"]


def _ours(model: Any, configured: Any) -> Numbers:
    """Metrics of the suite: opening and reading datasets, encoding, metrics, and the files of the report."""
    from clipzoo.build import build_part
    from clipzoo.distributed.world import World
    from clipzoo.evaluation.suite import Suite
    from clipzoo.runs.record import MetricKey

    with TemporaryDirectory() as output, redirect_stdout(StringIO()):
        metrics = build_part(configured, [], Suite).run(model, Path(output), World())
    keys = {key: MetricKey.parse(key) for key in metrics}
    return {f"{key.protocol}/{key.metric}".strip("/"): metrics[text] for text, key in keys.items()}


def _kind(folder: Path) -> str:
    """Content of dataset_type.txt; a multi-label dataset and one without the file have classes."""
    file = folder / "dataset_type.txt"
    return file.read_text().strip() if file.exists() else "classification"


def _loader(folder: Path, transform: Any, options: argparse.Namespace, split: str = "test") -> tuple[Any, Any]:
    """CLIP_benchmark's dataset in the tar layout, and its loader."""
    from clip_benchmark.datasets.builder import build_wds_dataset, image_captions_collate_fn
    from torch.utils.data import DataLoader, default_collate

    data = build_wds_dataset(folder.name, transform, split=split, data_dir=str(folder))
    collate = image_captions_collate_fn if data.classes is None else default_collate
    batches: Any = data.batched(options.batch, collation_fn=collate)
    return data, DataLoader(batches, batch_size=None, num_workers=options.workers)


def _clip_benchmark(model: Any, folder: Path, transform: Any, tokenizer: Any, options: argparse.Namespace) -> Numbers:
    from clip_benchmark.metrics import zeroshot_classification, zeroshot_retrieval

    if _kind(folder) == "choice":
        return _clip_benchmark_choice(model, folder, transform, tokenizer)
    data, loader = _loader(folder, transform, options)
    if data.classes is None:
        metrics = zeroshot_retrieval.evaluate(model, loader, tokenizer, "cpu", amp=False, recall_k_list=list(CUTOFFS))
        ways = {"image_to_text": "text_retrieval", "text_to_image": "image_retrieval"}
        pairs = [(way, cut) for way in ways for cut in CUTOFFS]
        return {f"{way}/recall_at_{cut}": 100 * metrics[f"{ways[way]}_recall@{cut}"] for way, cut in pairs}
    # Its evaluate() reads the classes from the loader's dataset.
    loader.dataset.classes = data.classes
    metrics = zeroshot_classification.evaluate(model, loader, tokenizer, data.classes, data.templates, "cpu", amp=False)
    if "mean_average_precision" in metrics:
        return {"mean_average_precision": 100 * metrics["mean_average_precision"]}
    numbers = {"top1": metrics["acc1"], "top5": metrics["acc5"], "mean_per_class": metrics["mean_per_class_recall"]}
    return {key: 100 * value for key, value in numbers.items() if key != "top5" or len(data.classes) > 5}


def _clip_benchmark_choice(model: Any, folder: Path, transform: Any, tokenizer: Any) -> Numbers:
    """Its selection of captions and images, with our reader: one image whose caption comes first, or two of each."""
    import torch
    from clip_benchmark.metrics import image_caption_selection

    from clipzoo.evaluation.datasets.tar import open_tar_dataset

    data: Any = open_tar_dataset(folder.parent, folder.name)
    numbers: Numbers = {}
    for category in sorted({example.category for example in data.examples}):
        examples = [example for example in data.examples if example.category == category]
        batches = [
            (
                torch.stack([transform(data.images[image]) for image in example.images])[None],
                # The caption of image i at place i.
                [[data.captions[example.captions[text]] for text in [*right, *({0, 1} - {*right})]]],
            )
            for example in examples
            for right in [[text for _, text in sorted(example.pairs)]]
        ]
        metrics = image_caption_selection.evaluate(model, batches, tokenizer, "cpu", amp=False)
        numbers[f"{category}/text"] = 100 * metrics["text_acc"]
        if len(examples[0].images) == 2:
            numbers |= {f"{category}/image": 100 * metrics["image_acc"], f"{category}/group": 100 * metrics["acc"]}
    return numbers


class NamedCuda(str):
    """A device of torch whose name equals "cuda"."""

    def __eq__(self, other: object) -> bool:
        return other == "cuda" or super().__eq__(other)

    __hash__ = str.__hash__


def _clip_benchmark_probe(model: Any, folder: Path, transform: Any, options: argparse.Namespace) -> Numbers:
    import torch
    from clip_benchmark.metrics import linear_probe

    splits = [split for split in ("train", "test", "val") if (folder / split).exists()]
    train, test, *validation = (_loader(folder, transform, options, split)[1] for split in splits)
    stays = [patch.object(kind, "cuda", lambda self, *_: self) for kind in (torch.nn.Module, torch.Tensor)]
    with stays[0], stays[1], TemporaryDirectory() as features, torch.enable_grad():
        metrics = linear_probe.evaluate(
            model, train, test, -1, options.batch, 0, 0.1, 10, "model", 0, features, NamedCuda("cpu"),
            *validation, amp=False,
        )  # fmt: skip
    return {"top1": 100 * metrics["lp_acc1"]}


def _open_clip(model: Any, folder: Path, transform: Any, tokenizer: Any, options: argparse.Namespace) -> Numbers:
    """open_clip's evaluators, with our reader of the dataset and the five captions of an image in turn."""
    import open_clip
    import torch
    from open_clip_train.train import get_clip_metrics
    from open_clip_train.zero_shot import run
    from torch.utils.data import DataLoader

    from clipzoo.evaluation.datasets.tar import open_tar_dataset

    data: Any = open_tar_dataset(folder.parent, folder.name)
    if hasattr(data, "captions"):
        shown: Any = Shown(data.images, transform)
        pictures: Any = DataLoader(shown, batch_size=options.batch, num_workers=options.workers)
        images = torch.cat([model.encode_image(picture) for picture in pictures])
        batches = range(0, len(data.captions), options.batch)
        captions = [tokenizer(data.captions[start : start + options.batch]) for start in batches]
        texts = torch.cat([model.encode_text(tokens) for tokens in captions])
        owner = torch.tensor(data.caption_image)
        galleries = owner.argsort(stable=True).view(len(data.images), -1).mT
        metrics = [get_clip_metrics(images, texts[gallery], 1.0) for gallery in galleries]
        recalls = {cut: statistics.fmean(metric[f"image_to_text_R@{cut}"] for metric in metrics) for cut in CUTOFFS}
        return {f"paired_image_to_text/recall_at_{cut}": 100 * recall for cut, recall in recalls.items()}
    templates = [lambda name, template=template: template.replace("{c}", name) for template in data.templates]
    weights = open_clip.build_zero_shot_classifier(model, tokenizer, data.class_names, templates, use_tqdm=False)
    labelled: Any = Shown(data.splits["test"], transform, labels=True)
    loader: Any = DataLoader(labelled, batch_size=options.batch, num_workers=options.workers)
    facts = SimpleNamespace(device="cpu", precision="none", batch_size=options.batch)
    top1, top5 = run(model, weights, loader, facts)
    return {"top1": 100 * top1, "top5": 100 * top5} if len(data.class_names) > 5 else {"top1": 100 * top1}


class Shown:
    """Pictures, with labels or without, through a transform."""

    def __init__(self, pictures: Any, transform: Any, labels: bool = False) -> None:
        self._pictures, self._transform, self._labels = pictures, transform, labels

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> Any:
        if not self._labels:
            return self._transform(self._pictures[index])
        picture, label = self._pictures[index]
        return self._transform(picture), label
