"""Write a trained model in the format of another library.

clipzoo export runs/demo --to onnx --output exported/onnx
clipzoo export runs/vit_b16/checkpoints/step_00001000.pt --to open_clip --output exported/open_clip

open_clip     open_clip.create_model("local-dir:FOLDER")
transformers  CLIPModel.from_pretrained("FOLDER"), with processor and tokenizer
torch         image.pt2, text.pt2 and score.pt2 for torch.export.load
onnx          image.onnx, text.onnx and score.onnx for onnxruntime
"""

from __future__ import annotations

import argparse
from pathlib import Path

FORMATS = ("open_clip", "transformers", "torch", "onnx")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN", help="a run directory or one of its checkpoints")
    parser.add_argument("--to", choices=FORMATS, required=True, help="the format")
    parser.add_argument("--output", type=Path, required=True, help="folder for the files")
    parser.add_argument("--trust", nargs="*", default=(), metavar="PACKAGE", help="packages of the run's own classes")
    parser.set_defaults(run=export)


def export(options: argparse.Namespace) -> None:
    from clipzoo.api.loading import load
    from clipzoo.formats.export import export

    export(load(options.model, trust=options.trust), options.output, options.to)
    print(f"wrote {options.output}: {', '.join(sorted(path.name for path in options.output.iterdir()))}")
