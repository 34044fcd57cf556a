"""Commands on trained models: export, index, search, explore. The docstring of a `*_arguments` function is its help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from clipzoo.cli.arguments import Progress, add_engine, number_in, output_folder
from clipzoo.config.vocabulary import Count, Range, Samples
from clipzoo.errors import ConfigError, number_of
from clipzoo.io.weights import checkpoints_in, is_checkpoint, mark_of, step_of

if TYPE_CHECKING:
    from clipzoo.data.dataset import ShardDataset
    from clipzoo.loading import LoadedModel

FORMATS = ("open_clip", "transformers", "hub", "torch", "onnx")


def export_arguments(parser: argparse.ArgumentParser) -> None:
    """Write a trained model in the format of another library.

    clipzoo export runs/demo --to onnx --output exported/onnx
    clipzoo export runs/vit_b16/checkpoints/step_00001000.pt --to open_clip --output exported/open_clip
    clipzoo export runs/demo --to hub --output exported/hub --licence apache-2.0 --upload USER/NAME

    open_clip     open_clip.create_model("local-dir:FOLDER")
    transformers  CLIPModel.from_pretrained("FOLDER"), with processor and tokenizer
    hub           clipzoo.load("FOLDER"); with a model card, for the Hugging Face hub
    torch         image.pt2, text.pt2 and score.pt2 for torch.export.load
    onnx          image.onnx, text.onnx and score.onnx for onnxruntime
    """
    parser.add_argument("model", metavar="RUN", help="a run directory, a checkpoint, a hub directory, or hf-hub:NAME")
    parser.add_argument("--to", choices=FORMATS, required=True, help="the format")
    parser.add_argument("--output", type=output_folder, required=True, help="folder for the files")
    parser.add_argument("--average", action="store_true", help="the averaged weights of a run with average=...")
    hub = ["--to hub"]
    parser.add_argument("--licence", needs=hub, help="licence of the model, for the card of a hub directory")
    parser.add_argument("--data-licence", needs=hub, help="licence of the training data, for the card")
    parser.add_argument("--upload", metavar="USER/NAME", needs=hub, help="upload it; needs a token of the hub")
    _set_defaults(parser, export)


def _set_defaults(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], None]) -> None:
    parser.add_argument("--trust", nargs="*", default=(), metavar="PACKAGE", help="packages of a run's own classes")
    parser.set_defaults(run=run)


def export(options: argparse.Namespace) -> None:
    from clipzoo.exports import hub

    if options.upload is not None:
        hub.require_token()
    model = hub.load(options.model, trust=options.trust, average=options.average)
    hub.export(model, options.output, options.to, options.licence, options.data_licence)
    print(f"wrote {options.output}: {', '.join(sorted(path.name for path in options.output.iterdir()))}")
    if options.upload is not None:
        print(f"uploaded to {hub.upload(options.output, options.upload)}")


def index_arguments(parser: argparse.ArgumentParser) -> None:
    """Embed images once, to search them by captions.

    clipzoo index runs/demo --images pictures/ --output indices/pictures
    clipzoo index runs/demo --images 'data/demo/train/{00000..00019}.tar' --output indices/demo
    torchrun --nproc-per-node 8 --no-python clipzoo index runs/demo --images pictures/ --output indices/pictures

    The same command completes an interrupted index.
    """
    parser.add_argument("model", metavar="RUN", help="a run directory, a checkpoint, a hub directory, or hf-hub:NAME")
    parser.add_argument("--images", required=True, help="a folder of images or tar shards, or a pattern of shards")
    parser.add_argument("--output", type=output_folder, required=True, help="folder of the index")
    _set_defaults(parser, index)


def index(options: argparse.Namespace) -> None:
    from clipzoo.distributed.launch import say
    from clipzoo.distributed.world import World
    from clipzoo.explore.index import build_index
    from clipzoo.exports.hub import load

    world = World.join("cpu", timeout=600.0, key="--device")
    model = load(options.model, trust=options.trust)
    built = build_index(model, options.model, options.images, options.output, world, report=say)
    if built is not None:
        output = options.output
        say(f'{number_of(len(built), "image")} in {output}: clipzoo search "a caption" --index {output}')
    world.leave()


def features_arguments(parser: argparse.ArgumentParser) -> None:
    """Write a model's embeddings of every image and caption of a dataset, for trainings with teacher=stored.

    clipzoo features runs/teacher data.shards='data/cc3m/{00000..00331}.tar' --output data/cc3m_features
    clipzoo features open_clip:ViT-L-14/datacomp_xl_s13b_b90k data=cc3m --output data/cc3m_features --device cuda
    clipzoo features runs/teacher data=cc3m --output data/cc3m_features --on local:8        8 processes, each with a GPU
    torchrun --nproc-per-node 8 --no-python clipzoo features runs/teacher data=cc3m --output data/cc3m_features

    The same command completes interrupted features, with any --on, and adds those of new shards.
    """
    parser.add_argument("model", metavar="MODEL", help="a run, a checkpoint, a hub directory, open_clip:NAME/TAG or "
                        "transformers:NAME")  # fmt: skip
    parser.add_argument("overrides", nargs="*", metavar="data.KEY=VALUE", help="the dataset, as for clipzoo train")
    parser.add_argument("--output", type=output_folder, required=True, help="folder of the features")
    parser.add_argument("--average", action="store_true", help="the averaged weights of a run with average=...")
    parser.add_argument("--batch", type=number_in(Count), default=256, help="samples per batch (default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    parser.add_argument("--precision", choices=("float32", "bf16", "fp16"), default="float32", help="of the encoders")
    add_engine(parser, None, "torchrun where that started the process, otherwise local:1")
    _set_defaults(parser, features)


def features(options: argparse.Namespace) -> None:
    from clipzoo.config.trust import read, trusted_names
    from clipzoo.distributed import launch

    for line in options.overrides:
        if read(line).key_or_group.partition(".")[0] not in ("data", "trust"):
            raise ConfigError(f"{line}: clipzoo features takes only the dataset, data=NAME and data.KEY=VALUE")
    trust, output = (*trusted_names(options.overrides), *options.trust), options.output
    data = model_and_dataset, options.model, options.average, options.device, (*options.overrides,), trust, output

    from clipzoo.teachers import write_features

    progress, on = Progress("features", "shards"), options.on
    on = on or ("torchrun" if launch.read().world_size > 1 else "local:1")
    written, samples = write_features(
        data, options.model, output, on, batch=options.batch, precision=options.precision, report=progress
    )
    print(f"{number_of(written, 'shard')} embedded in {progress.seconds:.0f} s, {number_of(samples, 'sample')} in "
          f"{output}: train with teacher=stored teacher.path={output}", file=sys.stderr)  # fmt: skip


def model_and_dataset(
    name: str, average: bool, device: str, overrides: tuple[str, ...], trust: tuple[str, ...], output: Path
) -> tuple[LoadedModel, ShardDataset]:
    """Return the model and the open dataset of `clipzoo features`. Collective if torchrun has started the process."""
    from clipzoo.build import build_part
    from clipzoo.config.compose import compose
    from clipzoo.data.dataset import ShardDataset
    from clipzoo.distributed.world import World
    from clipzoo.exports.hub import load
    from clipzoo.runs.identity import with_variables

    dataset = build_part(with_variables(compose(overrides)["data"]), trust, ShardDataset)
    # Ranks wait up to a day for the index.
    world = World.join(device, timeout=86_400.0, key="--device")
    model = load(name, trust=trust, average=average).to(world.device)
    dataset.open(output, world)
    world.leave()
    return model, dataset


def search_arguments(parser: argparse.ArgumentParser) -> None:
    """Search an index of images by captions.

    clipzoo search "a red circle" --index indices/pictures
    clipzoo search "a red circle" "two blue squares" --index indices/pictures --count 20 --candidates 500 --recall
    """
    parser.add_argument("captions", nargs="+", metavar="CAPTION")
    parser.add_argument("--index", type=Path, required=True, help="folder of the index")
    count = number_in(Samples)
    parser.add_argument("--count", type=count, default=10, help="images per caption (default: %(default)s)")
    parser.add_argument("--candidates", type=count, help="KME-CLIP: images that are scored exactly (default: all)")
    parser.add_argument("--recall", action="store_true", needs=["--candidates"],
                        help="print the share of the exact best images that is found")  # fmt: skip
    _set_defaults(parser, search)


def search(options: argparse.Namespace) -> None:
    from clipzoo.explore.index import SearchIndex

    index = SearchIndex(options.index, trust=options.trust)
    results = index.search(options.captions, options.count, options.candidates)
    for caption, matches in zip(options.captions, results, strict=True):
        print(caption)
        for rank, match in enumerate(matches, start=1):
            print(f"{rank:4d}  {match.score:8.3f}  {match.name}")
    if options.recall:
        recall = index.recall(options.captions, options.count, options.candidates)
        print(f"recall at {options.count} compared with exact search: {recall:.3f}")


def explore_arguments(parser: argparse.ArgumentParser) -> None:
    """Explore trained models in a browser: pictures by caption, neighbours, terms of a score, maps and curves.

    clipzoo explore runs/demo
    clipzoo explore runs/emoji/clip runs/emoji/wpse runs/emoji/kme
    clipzoo explore runs/demo --images pictures/
    clipzoo explore runs/demo --static page          page/index.html, which needs no server

    The page is served only on this machine, and no data leaves it.
    """
    default = "(default: %(default)s)"
    parser.add_argument("models", nargs="+", metavar="RUN", help="run or hub directories, checkpoints, hf-hub:NAME")
    pictures = parser.add_mutually_exclusive_group()
    pictures.add_argument("--images", help="explore images or tar shards instead of the evaluation datasets")
    pictures.add_argument("--dataset", action="append", default=[], metavar="NAME", help="only this one; repeatable")
    parser.add_argument("--limit", type=number_in(Samples), default=2000, help=f"pictures per dataset {default}")
    page = parser.add_mutually_exclusive_group()
    ports = number_in(Annotated[int, Range(at_least=0, at_most=65535)])
    page.add_argument("--port", type=ports, default=8765, help=f"port of the page; 0 for a free one {default}")
    page.add_argument("--static", type=output_folder, metavar="DIR", help="write a page that needs no server, and end")
    parser.add_argument("--captions", type=number_in(Samples), default=24, needs=["--static"],
                        help=f"captions of each dataset {default}")  # fmt: skip
    parser.add_argument("--cache", type=output_folder, metavar="DIR", help="for embeddings (default: RUN/explore)")
    _set_defaults(parser, explore)


def explore(options: argparse.Namespace) -> None:
    steps = [_checkpoint_step(source) for source in options.models]

    from clipzoo.explore.app import run

    run(options, steps)


def _checkpoint_step(source: str) -> int | None:
    """Return the number of steps of the checkpoint that `load` reads; ConfigError for a run without a checkpoint."""
    path = Path(source)
    if is_checkpoint(path):
        return step_of(path)
    if complete := [place for place in checkpoints_in(path / "checkpoints") if mark_of(place).exists()]:
        return step_of(complete[-1])
    if (path / "config.yaml").exists():
        from clipzoo.runs.directory import config_of

        every = config_of(path)["trainer"].get("checkpoints", {}).get("every")
        raise ConfigError(
            f"{source} has no checkpoint yet (trainer.checkpoints.every={every}): explore it after its first one; "
            f"clipzoo report {source} shows its curves"
        )
    return None
