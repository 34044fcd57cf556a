"""Zero-shot and retrieval compared with CLIP_benchmark's and open_clip's evaluators: all numbers, and the time.

    python scripts/benchmark.py evaluation --run runs/demo
    python scripts/benchmark.py evaluation --run runs/demo --encoder bench_vit --rounds 5

Agreement: the trained run on the sets on disk, in float64; the peers' code gets the same model through its interface.
The compared numbers are counts of right answers, so equal means equal. Speed: an untrained model of --encoder in
clipzoo and in open_clip with the same weights, float32, one thread; the programs read the same tars with as many
workers, in turn. The peers need numpy < 2.4 (their accuracy() fails with newer ones); it is put into
build/peer_evaluation, apart from the environment.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import ROOT, built, in_turn, install, log, medians, publish
from clipzoo.cli.arguments import Parser, number_in
from clipzoo.config.vocabulary import NonNegativeCount

PEER = ROOT / "build" / "peer_evaluation"
PACKAGES = ("clip-benchmark==1.6.2", "numpy<2.4")
CUTOFFS = (1, 5, 10)
Numbers = dict[str, float]


SHARED = {"batch": 64, "workers": 1, "encoder": "bench_vit"}


def add_options(parser: Parser) -> None:
    parser.add_argument("--run", type=Path, default=Path("runs/demo"), help="a trained run; default: %(default)s")
    parser.add_argument("--root", type=Path, default=Path("data/demo/downstream"), help="default: %(default)s")
    parser.add_argument("--sets", nargs="+", default=["shapes", "colours", "counts", "textures", "scenes"])
    parser.add_argument("--rounds", type=number_in(NonNegativeCount), default=3)


def main(options: argparse.Namespace) -> None:
    install(PEER, PACKAGES)
    # Before anything imports numpy.
    sys.path.insert(0, str(PEER))
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as scratch:
        agreement = {name: agree(options, name, Path(scratch)) for name in options.sets}
    with tempfile.TemporaryDirectory() as scratch:
        speed = race(options, Path(scratch)) if options.rounds else None
    result = {"agreement": agreement, "speed": speed, "encoder": options.encoder, "batch": options.batch}
    publish(options, result)
    differing = sum(result["differing"] for result in agreement.values())
    sys.exit(f"{differing} numbers differ" if differing else 0)


def agree(options: argparse.Namespace, name: str, scratch: Path) -> dict[str, Any]:
    """Every number of the three programs in percent, for the run's model in float64."""
    import clipzoo
    from clipzoo.evaluation.datasets.tar import open_tar_dataset

    model = clipzoo.load(options.run).double()
    folder = _without_shared_captions(options.root, name, scratch)
    data = open_tar_dataset(folder.parent, name)
    peer = Behind(model)
    ours = _ours(model, data, options, model.tokenizer)
    peers = {
        "CLIP_benchmark": _clip_benchmark(peer, folder, model.transform, model.tokenizer, options),
        "open_clip": _open_clip(peer, data, model.transform, model.tokenizer, options),
    }
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
    if not hasattr(data, "captions"):
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
    """Seconds of every program on every set, in turn."""
    import open_clip

    import clipzoo
    from clipzoo.evaluation.datasets.tar import open_tar_dataset

    untrained, _, plain = built(f"encoder={options.encoder}", "head=clip")
    model = clipzoo.LoadedModel(untrained, plain).eval()
    clipzoo.export(model, scratch)
    peer, _, transform = open_clip.create_model_and_transforms(f"local-dir:{scratch}")
    peer.eval()
    tokenizer = open_clip.get_tokenizer(f"local-dir:{scratch}")
    programs: dict[str, Callable[[str], Any]] = {
        "clipzoo": lambda name: _ours(model, open_tar_dataset(options.root, name), options, model.tokenizer),
        "CLIP_benchmark": lambda name: _clip_benchmark(peer, options.root / name, transform, tokenizer, options),
        "open_clip": lambda name: _open_clip(peer, open_tar_dataset(options.root, name), transform, tokenizer, options),
    }

    def taken(program: str, name: str) -> float:
        begin = time.perf_counter()
        programs[program](name)
        return time.perf_counter() - begin

    pairs = [(program, name) for name in options.sets for program in programs]
    readings = in_turn({f"{program} {name}": partial(taken, program, name) for program, name in pairs}, options.rounds)
    seconds = {name: {program: readings[f"{program} {name}"] for program in programs} for name in options.sets}
    middle = {name: medians(by_program) for name, by_program in seconds.items()}
    ratios = {
        name: {program: value / by["clipzoo"] for program, value in by.items() if program != "clipzoo"}
        for name, by in middle.items()
    }
    return {"seconds": seconds, "medians": middle, "times_as_fast": ratios}


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


def _ours(model: Any, data: Any, options: argparse.Namespace, tokenizer: Any) -> Numbers:
    from clipzoo.evaluation.datasets.dataset import RetrievalDataset
    from clipzoo.evaluation.encoder import BatchEncoder
    from clipzoo.evaluation.retrieval import retrieval
    from clipzoo.evaluation.zero_shot import zero_shot

    size = model.config["encoder"]["image_size"]
    encoder = BatchEncoder(tokenizer, size, "bicubic", options.batch, options.workers, "float32")
    if isinstance(data, RetrievalDataset):
        metrics = retrieval(model, data, encoder, draws=1, paired=True).metrics
        return {f"{protocol}/{name}": value for protocol, part in metrics.items() for name, value in part.items()}
    return zero_shot(model, data, encoder, size, draws=1).metrics


def _clip_benchmark(model: Any, folder: Path, transform: Any, tokenizer: Any, options: argparse.Namespace) -> Numbers:
    from clip_benchmark.datasets.builder import build_wds_dataset, image_captions_collate_fn
    from clip_benchmark.metrics import zeroshot_classification, zeroshot_retrieval
    from torch.utils.data import DataLoader, default_collate

    data = build_wds_dataset(folder.name, transform, split="test", data_dir=str(folder))
    captions = data.classes is None
    loader: Any = DataLoader(
        data.batched(options.batch, collation_fn=image_captions_collate_fn if captions else default_collate),
        batch_size=None,
        num_workers=options.workers,
    )
    if captions:
        metrics = zeroshot_retrieval.evaluate(model, loader, tokenizer, "cpu", amp=False, recall_k_list=list(CUTOFFS))
        ways = {"image_to_text": "text_retrieval", "text_to_image": "image_retrieval"}
        pairs = [(way, cut) for way in ways for cut in CUTOFFS]
        return {f"{way}/recall_at_{cut}": 100 * metrics[f"{ways[way]}_recall@{cut}"] for way, cut in pairs}
    # Its evaluate() reads the classes from the loader's dataset.
    loader.dataset.classes = data.classes
    metrics = zeroshot_classification.evaluate(model, loader, tokenizer, data.classes, data.templates, "cpu", amp=False)
    numbers = {"top1": metrics["acc1"], "top5": metrics["acc5"], "mean_per_class": metrics["mean_per_class_recall"]}
    return {key: 100 * value for key, value in numbers.items() if key != "top5" or len(data.classes) > 5}


def _open_clip(model: Any, data: Any, transform: Any, tokenizer: Any, options: argparse.Namespace) -> Numbers:
    """open_clip's evaluators, with our reader of the dataset and the five captions of an image in turn."""
    import open_clip
    import torch
    from open_clip_train.train import get_clip_metrics
    from open_clip_train.zero_shot import run
    from torch.utils.data import DataLoader

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
