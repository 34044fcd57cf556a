"""Pairs of an image file and its captions: in a folder, a table, or Karpathy's splits."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clipzoo.data.faults import BadSampleError
from clipzoo.data.left_out import NO_IMAGE_FILE, LeftOut
from clipzoo.data.shards.captions import digest, has_text
from clipzoo.data.shards.scan import IMAGE_EXTENSIONS
from clipzoo.errors import ConfigError, first_line, number_of
from clipzoo.io import MB, DamagedFileError, below, read_bytes, read_table

ALL_LINES = "all"


@dataclass(frozen=True)
class Captions:
    """Captions of one image. joined: the number of lines that were joined to one caption."""

    texts: list[str]
    joined: int = 1


@dataclass(frozen=True)
class Pair:
    """An image file and its captions: given, or in a file of which `caption_line` is read (see `chosen_captions`)."""

    image: Path
    captions: list[str]
    caption_file: Path | None = None
    caption_line: str | None = None

    def read_captions(self) -> Captions:
        """Raises BadSampleError if the file of the captions cannot be read or lacks the line."""
        if self.caption_file is None:
            return Captions(self.captions)
        try:
            text = read_bytes(self.caption_file, MB).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadSampleError("caption_not_utf8", f"{self.caption_file.name}: {error}") from error
        except DamagedFileError as error:
            raise BadSampleError("missing_caption", f"{self.caption_file.name}: {error.fault}") from error
        return chosen_captions(text, self.caption_line)


def chosen_captions(text: str, line: str | None) -> Captions:
    """Choose captions from the text of a caption file.

    line: None joins all lines to one caption; "all" makes each line a caption; "2" is the second line; any other text
    is the beginning of the line, which is removed: "de.utf8=" chooses "Hund" from "de.utf8=Hund".

    Raises:
        BadSampleError: the text has no such line.
    """
    lines = text.splitlines()
    if line is None:
        return Captions([text], joined=sum(bool(entry.strip()) for entry in lines))
    if line == ALL_LINES:
        return Captions(lines)
    if line.isdecimal():
        chosen = lines[int(line) - 1 : int(line)]
    else:
        chosen = [entry.removeprefix(line) for entry in lines if entry.startswith(line)][:1]
    if not chosen:
        raise BadSampleError("missing_caption", f"the caption file has no line {line}")
    return Captions(chosen)


def pairs_from_folder(folder: Path, caption_line: str | None = None) -> tuple[list[Pair], list[LeftOut]]:
    """Return all images below the folder that have a caption beside them, the same name with .txt, and all other files.

    Images without a caption have the kind "missing_caption", files of another type NO_IMAGE_FILE.

    Raises:
        ConfigError: there is no such pair.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    known, pairs, left_out = set(files), list[Pair](), list[LeftOut]()
    for path in files:
        if not _is_image(path):
            continue
        if (caption := path.with_suffix(".txt")) in known:
            pairs.append(Pair(path, [], caption, caption_line))
        else:
            left_out.append(LeftOut(path, "missing_caption", f"there is no {caption.name} next to it"))
    used = {pair.caption_file for pair in pairs}
    for path in files:
        if path not in used and not _is_image(path):
            reason = "there is no image next to it" if path.suffix == ".txt" else f"not {', '.join(IMAGE_EXTENSIONS)}"
            left_out.append(LeftOut(path, NO_IMAGE_FILE, reason))
    if not pairs:
        images = sum(_is_image(path) for path in files)
        others = f"; it holds {len(files) - images} other files" if len(files) > images else ""
        raise ConfigError(
            f"{folder}: none of {number_of(images, 'image')} has a caption next to it (the same name with .txt){others}"
        )
    return pairs, left_out


def pairs_from_table(table: Path, image_column: str, caption_column: str) -> list[Pair]:
    """Return the pairs of a CSV or TSV. Paths are relative to the table; rows with the same image become one pair."""
    captions: dict[str, list[str]] = {}
    for row in read_table(table, (image_column, caption_column)):
        captions.setdefault(row[image_column], []).append(row[caption_column])
    if not captions:
        raise ConfigError(f"{table} has no rows")
    return [Pair(table.parent / image, texts) for image, texts in captions.items()]


def pairs_from_karpathy(split_file: Path, images: Path, splits: list[str]) -> list[Pair]:
    """Return the images of some splits of Karpathy's dataset_coco.json or dataset_flickr30k.json, with all captions."""
    try:
        entries = json.loads(read_bytes(split_file, 160 * MB))["images"]
        known = sorted({str(entry["split"]) for entry in entries})
        pairs = [
            Pair(
                below(images, "/".join(filter(None, (entry.get("filepath"), entry["filename"]))), links=True),
                [str(text["raw"]) for text in entry["sentences"]],
            )
            for entry in entries
            if entry["split"] in splits
        ]
    except DamagedFileError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{split_file} is not Karpathy's splits as JSON: {first_line(error)}") from None
    if set(splits) - set(known):
        raise ConfigError(f"{split_file} has no split {sorted(set(splits) - set(known))[0]!r}, but: {', '.join(known)}")
    return pairs


def hold_out(pairs: Sequence[Pair], share: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Divide pairs into those for training and those held out; no caption is on both sides.

    Pairs that share a caption, directly or through other pairs, form a group and stay together. Groups are held out in
    an order that depends on the seed and their captions alone, as long as they fit into `share` of the pairs; a larger
    group stays in training. Pairs whose captions cannot be read stay in training too.

    Raises:
        ConfigError: fewer than two pairs are held out.
    """
    # Takes a second to import.
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    digests, owners = array("Q"), array("q")
    for number, pair in enumerate(pairs):
        try:
            captions = [caption for caption in pair.read_captions().texts if has_text(caption)]
        except BadSampleError:
            continue
        digests.extend(map(digest, captions))
        owners.extend([number] * len(captions))
    values, captions_of_pairs = np.unique(np.array(digests, np.uint64), return_inverse=True)
    nodes = len(pairs) + len(values)
    edges = np.ones(len(owners), bool), (np.array(owners, np.int64), len(pairs) + captions_of_pairs)
    group_of = connected_components(coo_array(edges, shape=(nodes, nodes)), directed=False)[1]
    sizes = np.bincount(group_of[: len(pairs)])
    # The smallest digest of a group, drawn with the seed, gives its place.
    of_captions = group_of[len(pairs) :]
    names = {int(group): int(value) for group, value in zip(of_captions[::-1], values[::-1], strict=True)}
    room, chosen = int(share * len(pairs)), set()
    for group in sorted(names, key=lambda group: digest(f"{seed} {names[group]}")):
        if sizes[group] <= room:
            room -= int(sizes[group])
            chosen.add(group)
    sides: tuple[list[Pair], list[Pair]] = [], []
    for pair, group in zip(pairs, group_of, strict=False):
        sides[int(group) in chosen].append(pair)
    if len(sides[1]) < 2:
        raise ConfigError(
            f"--hold-out {share:.3g} of {len(pairs)} pairs holds out {len(sides[1])}: give a larger share; pairs with "
            "equal captions stay together"
        )
    return sides


def _is_image(path: Path) -> bool:
    return path.suffix[1:].lower() in IMAGE_EXTENSIONS
