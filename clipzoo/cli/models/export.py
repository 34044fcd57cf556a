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

from __future__ import annotations

import argparse

from clipzoo.cli.arguments import output_folder

FORMATS = ("open_clip", "transformers", "hub", "torch", "onnx")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN", help="a run directory, a checkpoint, a hub directory, or hf-hub:NAME")
    parser.add_argument("--to", choices=FORMATS, required=True, help="the format")
    parser.add_argument("--output", type=output_folder, required=True, help="folder for the files")
    parser.add_argument("--average", action="store_true", help="the averaged weights of a run with average=...")
    parser.add_argument("--trust", nargs="*", default=(), metavar="PACKAGE", help="packages of the run's own classes")
    hub = ["--to hub"]
    parser.add_argument("--licence", needs=hub, help="licence of the model, for the card of a hub directory")
    parser.add_argument("--data-licence", needs=hub, help="licence of the training data, for the card")
    parser.add_argument(
        "--upload", metavar="USER/NAME", needs=hub, help="upload the directory; needs a token of the hub"
    )
    parser.set_defaults(run=export)


def export(options: argparse.Namespace) -> None:
    from clipzoo.exports import hub
    from clipzoo.exports.hub import export
    from clipzoo.loading import load

    if options.upload is not None:
        hub.require_token()
    model = load(options.model, trust=options.trust, average=options.average)
    export(model, options.output, options.to, options.licence, options.data_licence)
    print(f"wrote {options.output}: {', '.join(sorted(path.name for path in options.output.iterdir()))}")
    if options.upload is not None:
        print(f"uploaded to {hub.upload(options.output, options.upload)}")
