"""Commands on a trained model: `clipzoo export`, `clipzoo index` and `clipzoo search`."""

from __future__ import annotations

import argparse
from pathlib import Path

from clipzoo.cli.arguments import number_in, output_folder
from clipzoo.config.vocabulary import Samples
from clipzoo.errors import number_of

FORMATS = ("open_clip", "transformers", "hub", "torch", "onnx")
MODEL = "a run directory, a checkpoint, a hub directory, or hf-hub:NAME"
INDEX_TIMEOUT_SECONDS = 600.0


def export(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("model", metavar="RUN", help=MODEL)
    parser.add_argument("--to", choices=FORMATS, required=True, help="the format")
    parser.add_argument("--output", type=output_folder, required=True, help="folder for the files")
    parser.add_argument("--average", action="store_true", help="the averaged weights of a run with average=...")
    _add_trust(parser)
    hub = ["--to hub"]
    parser.add_argument("--licence", needs=hub, help="licence of the model, for the card of a hub directory")
    parser.add_argument("--data-licence", needs=hub, help="licence of the training data, for the card")
    parser.add_argument(
        "--upload", metavar="USER/NAME", needs=hub, help="upload the directory; needs a token of the hub"
    )
    parser.set_defaults(run=run_export)


def run_export(options: argparse.Namespace) -> None:
    from clipzoo.export import hub
    from clipzoo.loading import load

    if options.upload is not None:
        hub.require_token()
    model = load(options.model, trust=options.trust, average=options.average)
    hub.export(model, options.output, options.to, options.licence, options.data_licence)
    print(f"wrote {options.output}: {', '.join(sorted(path.name for path in options.output.iterdir()))}")
    if options.upload is not None:
        print(f"uploaded to {hub.upload(options.output, options.upload)}")


def index(parser: argparse.ArgumentParser) -> None:
    """Embed images once, to search them by captions.

    clipzoo index runs/demo --images pictures/ --output indices/pictures
    clipzoo index runs/demo --images 'data/demo/train/{00000..00019}.tar' --output indices/demo
    torchrun --nproc-per-node 8 --no-python clipzoo index runs/demo --images pictures/ --output indices/pictures

    The same command completes an interrupted index.
    """
    parser.add_argument("model", metavar="RUN", help=MODEL)
    parser.add_argument("--images", required=True, help="a folder of images or tar shards, or a pattern of shards")
    parser.add_argument("--output", type=output_folder, required=True, help="folder of the index")
    _add_trust(parser)
    parser.set_defaults(run=run_index)


def run_index(options: argparse.Namespace) -> None:
    from clipzoo.api.search.index import build_index
    from clipzoo.distributed.launch import say
    from clipzoo.distributed.world import World
    from clipzoo.loading import load

    output = options.output
    world = World.join("cpu", INDEX_TIMEOUT_SECONDS, key="--device")
    model = load(options.model, trust=options.trust)
    built = build_index(model, options.model, options.images, output, world, report=say)
    if built is not None:
        say(f'{number_of(len(built), "image")} in {output}: clipzoo search "a caption" --index {output}')
    world.leave()


def search(parser: argparse.ArgumentParser) -> None:
    """Search an index of images by captions.

    clipzoo search "a red circle" --index indices/pictures
    clipzoo search "a red circle" "two blue squares" --index indices/pictures --count 20 --candidates 500 --recall
    """
    parser.add_argument("captions", nargs="+", metavar="CAPTION")
    parser.add_argument("--index", type=Path, required=True, help="folder of the index")
    parser.add_argument(
        "--count", type=number_in(Samples), default=10, help="images per caption (default: %(default)s)"
    )
    parser.add_argument(
        "--candidates", type=number_in(Samples), help="KME-CLIP: images that are scored exactly (default: all)"
    )
    parser.add_argument("--recall", action="store_true", needs=["--candidates"],
                        help="print the share of the exact best images that is found")  # fmt: skip
    _add_trust(parser)
    parser.set_defaults(run=run_search)


def run_search(options: argparse.Namespace) -> None:
    from clipzoo.api.search.index import SearchIndex, matches_as_text

    index = SearchIndex(options.index, trust=options.trust)
    results = index.search(options.captions, options.count, options.candidates)
    for caption, matches in zip(options.captions, results, strict=True):
        print(caption)
        print("\n".join(matches_as_text([matches])))
    if options.recall:
        recall = index.recall(options.captions, options.count, options.candidates)
        print(f"recall at {options.count} compared with exact search: {recall:.3f}")


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust", nargs="*", default=(), metavar="PACKAGE", help="packages of the run's own classes")
