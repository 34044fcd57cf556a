"""Accuracy of a trained KME-CLIP model whose image points are merged: the table of docs/benchmarks/heads.md.

    python scripts/merging_table.py runs/kme --root data/demo/downstream --counts 50 32 16 8 4 1

Every row has the same weights and head.merge=k. Error: of the scores of all captions with 250 images of `scenes`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import clipzoo
from clipzoo.build import build_part
from clipzoo.cli.arguments import Parser, number_in, run_main
from clipzoo.config.vocabulary import Count
from clipzoo.evaluation.datasets.benchmarks import open_benchmark
from clipzoo.evaluation.datasets.dataset import ClassificationDataset, RetrievalDataset
from clipzoo.evaluation.encoder import BatchEncoder
from clipzoo.evaluation.retrieval import retrieval
from clipzoo.evaluation.zero_shot import zero_shot
from clipzoo.heads.kme import KmeHead
from clipzoo.report.render import markdown, text_table

IMAGES = 250


@torch.no_grad()
def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--root", type=Path, default=Path("data/demo/downstream"), help="evaluation datasets")
    parser.add_argument("--counts", type=number_in(Count), nargs="+", default=[50, 32, 16, 8, 4, 1])
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = clipzoo.load(options.run)
    scenes = open_benchmark("scenes", options.root, "slip")
    assert isinstance(scenes, RetrievalDataset)
    pixels = torch.stack([model.transform(scenes.images[index]) for index in range(IMAGES)])
    text = model.encode_text(model.tokenizer(list(scenes.captions)))
    head = model.head
    assert isinstance(head, KmeHead)
    head.merge = None
    all_points = head.embed_image(model.image_features(pixels[:1])).points.shape[1]
    exact = model.similarity(model.encode_image(pixels), text)
    size = model.config["encoder"]["image_size"]
    encoder = BatchEncoder(build_part(model.config["eval"]["tokenizer"]), size, "bicubic", 256, 0, "float32")
    rows = []
    for count in (None, *(count for count in options.counts if count < all_points)):
        head.merge = count
        error = exact - model.similarity(model.encode_image(pixels), text)
        bound = float(head.logs().get("merge_error", torch.zeros(())))
        numbers = [f"{float(error.mean()):.4f}", f"{float(error.max()):.4f}", f"{bound:.4f}"]
        for name in ("shapes", "colours"):
            dataset = open_benchmark(name, options.root, "slip")
            assert isinstance(dataset, ClassificationDataset)
            numbers.append(f"{zero_shot(model, dataset, encoder, size, 1).metrics['top1']:.1f}")
        recalls = retrieval(model, scenes, encoder, 1, False).metrics
        numbers += [f"{recalls[way]['recall_at_1']:.1f}" for way in ("image_to_text", "text_to_image")]
        rows.append([f"{all_points}, exact" if count is None else str(count), *numbers])
    header = ["points", "mean error", "largest", "merge_error", "shapes", "colours", "image to text @1", "to image @1"]
    print(markdown(text_table(header, rows, left=1)), flush=True)
    print(f"exact scores: standard deviation {float(exact.std()):.2f}; gamma {float(head.gamma):.2f}")


if __name__ == "__main__":
    run_main(main)
