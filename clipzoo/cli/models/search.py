"""Search an index of images by captions.

clipzoo search "a red circle" --index indices/pictures
clipzoo search "a red circle" "two blue squares" --index indices/pictures --count 20 --candidates 500 --recall
"""

from __future__ import annotations

import argparse
from pathlib import Path

from clipzoo.cli.arguments import number_in
from clipzoo.config.vocabulary import Samples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("captions", nargs="+", metavar="CAPTION")
    parser.add_argument("--index", type=Path, required=True, help="folder of the index")
    parser.add_argument(
        "--count", type=number_in(Samples), default=10, help="images per caption (default: %(default)s)"
    )
    parser.add_argument(
        "--candidates", type=number_in(Samples), help="KME-CLIP: images that are scored exactly (default: all)"
    )
    parser.add_argument(
        "--recall",
        action="store_true",
        needs=["--candidates"],
        help="print the share of the exact best images that is found",
    )
    parser.add_argument("--trust", nargs="*", default=(), metavar="PACKAGE", help="packages of the run's own classes")
    parser.set_defaults(run=search)


def search(options: argparse.Namespace) -> None:
    from clipzoo.api.search.index import SearchIndex, matches_as_text

    index = SearchIndex(options.index, trust=options.trust)
    for caption, matches in zip(
        options.captions, index.search(options.captions, options.count, options.candidates), strict=True
    ):
        print(caption)
        print("\n".join(matches_as_text([matches])))
    if options.recall:
        recall = index.recall(options.captions, options.count, options.candidates)
        print(f"recall at {options.count} compared with exact search: {recall:.3f}")
