"""Get emoji of two vendors as a dataset: train on the pictures of one, evaluate on those of the other.

clipzoo emoji                                                    data/emoji: train on Google's, evaluate on Twitter's
clipzoo emoji --train twitter --root data/emoji-twitter          the other way round

npm fetches the packages by name (136 MB, kept in data/npm). A complete dataset is reused.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from clipzoo.cli.arguments import output_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--root", type=output_folder, default=Path("data/emoji"), help="output folder (default: %(default)s)"
    )
    parser.add_argument(
        "--packages",
        type=output_folder,
        default=Path("data/npm"),
        help="folder of npm's packages (default: %(default)s)",
    )
    parser.add_argument(
        "--train", choices=("google", "twitter"), default="google", help="vendor to train on (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from clipzoo.example_data.emoji.dataset import ensure_emoji, licences, other

    made = ensure_emoji(options.root, options.packages, options.train, _say)
    outcome = "made" if made else "exists already"
    _say(f"{options.root} {outcome}: training on {options.train}, evaluation on {other(options.train)}")
    if made:
        _say("licences: " + "; ".join(licences()))


def _say(text: str) -> None:
    print(f"== emoji: {text}", flush=True)
