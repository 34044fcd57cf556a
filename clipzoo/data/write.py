"""Datasets from files on disk: pairs of an image file and its captions, and their shards."""

from __future__ import annotations

import json
import tarfile
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from clipzoo import io
from clipzoo.data.captions import StoredSample, digest, has_text
from clipzoo.data.faults import NO_IMAGE_FILE, BadSampleError, LeftOut
from clipzoo.data.images import MAX_PIXELS, read_header, read_image_file
from clipzoo.data.index import ShardIndex
from clipzoo.data.maps.engines import map_in_children
from clipzoo.data.reader import ShardReader
from clipzoo.data.tar import IMAGE_EXTENSIONS
from clipzoo.errors import ConfigError, number_of

QUALITY = 95
"""Default quality of images that are encoded again, from 1 to 100."""
_LARGEST = 10**9
"""Pixels of the largest image that is scaled down."""
_PAIRS_A_PROCESS = 100
"""Fewer pairs are packed in less time than another process takes to start."""
_WRITE_CHUNK = 8


@dataclass(frozen=True)
class Pair:
    """An image file with its captions, or with a caption file of which `caption_line` is read.

    caption_line: None joins all lines to one caption; "all" makes each line a caption; "2" is the second line; any
    other text is the beginning of the line, which is removed: "de.utf8=" chooses "Hund" from "de.utf8=Hund".
    facts: further keys of the .json.
    """

    image: Path
    captions: list[str]
    caption_file: Path | None = None
    caption_line: str | None = None
    facts: Mapping[str, str | list[str]] = field(default_factory=dict)

    def read_captions(self) -> list[str]:
        """Return the captions. Raises BadSampleError."""
        if self.caption_file is None:
            return self.captions
        try:
            text = io.read_bytes(self.caption_file, io.MB).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadSampleError("caption_not_utf8", f"{self.caption_file.name}: {error}") from error
        except io.DamagedFileError as error:
            raise BadSampleError("missing_caption", f"{self.caption_file.name}: {error.fault}") from error
        lines, line = text.splitlines(), self.caption_line
        if line is None:
            return [text]
        if line == "all":
            return lines
        if line.isdecimal():
            captions = lines[int(line) - 1 : int(line)]
        else:
            captions = [entry.removeprefix(line) for entry in lines if entry.startswith(line)][:1]
        if not captions:
            raise BadSampleError("missing_caption", f"the caption file has no line {line}")
        return captions

    def read_image(self) -> bytes:
        """Return the encoded image. Raises BadSampleError."""
        return read_image_file(self.image)


@dataclass(frozen=True)
class StoredPair:
    """A sample of other shards or tables, with the interface of `Pair`.

    dataset: fingerprint of all. kept: keys that the .json keeps.
    """

    number: int
    dataset: str
    index: ShardIndex = field(repr=False)
    reader: ShardReader = field(repr=False)
    kept: Sequence[str] = field(repr=False)

    @property
    def image(self) -> Path:
        shard, position = self.index.locate(self.number)
        return Path(self.index.shards[shard].name, self.index.keys(shard)[position])

    @property
    def facts(self) -> dict[str, Any]:
        values = {key: self._sample.value(key) for key in self.kept}
        return {key: value for key, value in values.items() if value is not None}

    @property
    def _sample(self) -> StoredSample:
        return self.reader.sample(self.index, *self.index.locate(self.number))

    def read_captions(self) -> list[str]:
        return self._sample.captions(self.reader.rules.caption_key)[0]

    def read_image(self) -> bytes:
        return self._sample.image()


AnyPair = Pair | StoredPair


def pairs_from_folder(folder: Path, caption_line: str | None = None) -> tuple[list[Pair], list[LeftOut]]:
    """Return the images below the folder that have a caption file (same name, .txt) next to them, and all other files.

    Images without a caption have the kind "missing_caption", other files NO_IMAGE_FILE. Raises ConfigError for no pair.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    images = [path for path in files if path.suffix[1:].lower() in IMAGE_EXTENSIONS]
    other_files = set(files).difference(images)
    pairs, left_out, caption_files = list[Pair](), list[LeftOut](), set[Path]()
    for path in images:
        if (caption := path.with_suffix(".txt")) in other_files:
            pairs.append(Pair(path, [], caption, caption_line))
            caption_files.add(caption)
        else:
            left_out.append(LeftOut(path, "missing_caption", f"there is no {caption.name} next to it"))
    for path in sorted(other_files - caption_files):
        reason = "there is no image next to it" if path.suffix == ".txt" else f"not {', '.join(IMAGE_EXTENSIONS)}"
        left_out.append(LeftOut(path, NO_IMAGE_FILE, reason))
    if not pairs:
        raise ConfigError(
            f"{folder}: none of {number_of(len(images), 'image')} has a caption next to it (the same name with .txt)"
            + (f"; it holds {len(other_files)} other files" if other_files else "")
        )
    return pairs, left_out


def pairs_from_table(table: Path, image_column: str, caption_column: str, kept: Sequence[str] = ()) -> list[Pair]:
    """Return the pairs of a CSV or TSV. Paths are relative to the table; rows with the same image become one pair.

    kept: columns that the .json keeps, from the first row of an image.
    """
    captions: dict[str, list[str]] = {}
    facts: dict[str, dict[str, str]] = {}
    for row in io.read_table(table, (image_column, caption_column, *kept)):
        captions.setdefault(row[image_column], []).append(row[caption_column])
        facts.setdefault(row[image_column], {column: row[column] for column in kept})
    if not captions:
        raise ConfigError(f"{table} has no rows")
    return [Pair(table.parent / image, texts, facts=facts[image]) for image, texts in captions.items()]


def pairs_from_karpathy(split_file: Path, images: Path, splits: list[str]) -> list[Pair]:
    """Return the images of some splits of Karpathy's dataset_coco.json or dataset_flickr30k.json, with all captions."""
    entries = karpathy_entries(split_file)
    known = sorted({entry["split"] for entry in entries})
    if set(splits) - set(known):
        raise ConfigError(f"{split_file} has no split {sorted(set(splits) - set(known))[0]!r}, but: {', '.join(known)}")
    pairs = list[Pair]()
    for entry in entries:
        if entry["split"] in splits:
            name = "/".join(map(str, filter(None, (entry.get("filepath"), entry["filename"]))))
            pairs.append(Pair(io.below(images, name, links=True), [text["raw"] for text in entry["sentences"]]))
    return pairs


def karpathy_entries(split_file: Path, remedy: str = "") -> list[dict[str, Any]]:
    """Return the entries of images in one of Karpathy's dataset_*.json. Raises DamagedFileError."""
    entries: list[dict[str, Any]] = io.read_json(split_file, 160 * io.MB, remedy, fields={"images": list})["images"]
    for entry in entries:
        io.require_fields(split_file, entry, {"split": str, "filename": str, "sentences": list}, remedy)
        for sentence in entry["sentences"]:
            io.require_fields(split_file, sentence, {"raw": str}, remedy)
    return entries


def usable_captions(pair: AnyPair) -> list[str]:
    """Return the captions with a letter or digit, on one line each. Raises BadSampleError if there is none."""
    captions = [" ".join(caption.split()) for caption in pair.read_captions() if has_text(caption)]
    if not captions:
        raise BadSampleError("empty_caption", "the caption has no letter or digit")
    return captions


def hold_out(pairs: Sequence[AnyPair], share: float, seed: int) -> tuple[list[AnyPair], list[AnyPair]]:
    """Split pairs into training and held-out pairs, which have no caption in common.

    Pairs that share a caption, directly or through other pairs, form a group and stay together. Groups are held out in
    an order that depends only on the seed and their captions, as long as they fit into `share` of the pairs. Other
    groups, and pairs without readable captions, stay in training. Raises ConfigError if fewer than two are held out.
    """
    # scipy takes a second to import.
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    digests, owners = array("Q"), array("q")
    for number, pair in enumerate(pairs):
        try:
            captions = usable_captions(pair)
        except BadSampleError:
            continue
        digests.extend(map(digest, captions))
        owners.extend([number] * len(captions))
    values, captions_of_pairs = np.unique(np.array(digests, np.uint64), return_inverse=True)
    nodes = len(pairs) + len(values)
    edges = np.ones(len(owners), bool), (np.array(owners, np.int64), len(pairs) + captions_of_pairs)
    group_of = connected_components(coo_array(edges, shape=(nodes, nodes)), directed=False)[1]
    sizes = np.bincount(group_of[: len(pairs)])
    # The seed and the smallest digest of a group determine its place in the order.
    caption_groups = group_of[len(pairs) :]
    group_digests = {int(group): int(value) for group, value in zip(caption_groups[::-1], values[::-1], strict=True)}
    pairs_left, held_out = int(share * len(pairs)), set()
    for group in sorted(group_digests, key=lambda group: digest(f"{seed} {group_digests[group]}")):
        if sizes[group] <= pairs_left:
            pairs_left -= int(sizes[group])
            held_out.add(group)
    sides: tuple[list[AnyPair], list[AnyPair]] = [], []
    for pair, group in zip(pairs, group_of, strict=False):
        sides[int(group) in held_out].append(pair)
    if len(sides[1]) < 2:
        raise ConfigError(
            f"--hold-out {share:.3g} of {len(pairs)} pairs holds out {len(sides[1])}: give a larger share; pairs with "
            "equal captions stay together"
        )
    return sides


@dataclass(frozen=True)
class ShardWriter:
    """Writes FOLDER/00000.tar, ... with NAME.jpg, .txt and .json of every pair that training can use.

    Shard s holds the usable ones of pairs s * samples_a_shard to (s + 1) * samples_a_shard - 1 of the order, whatever
    the other shards hold: processes write shards at the same time, and the bytes do not depend on their number.

    shuffle_seed: None for the given order, although a shard of one class or album makes poor batches. shortest_side:
    scale larger images down to it; None for none. image_format: jpg, webp or avif for images that are encoded again, of
    this quality: those that are scaled or have another format; None for JPEG of the scaled ones. The original bytes of
    all others are written. max_pixels: larger images are left out.
    """

    samples_a_shard: int
    shuffle_seed: int | None
    shortest_side: int | None
    image_format: str | None = None
    quality: int = QUALITY
    max_pixels: int = MAX_PIXELS
    processes: int = 1

    def write(
        self, pairs: Sequence[AnyPair], folder: Path, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> tuple[list[str], list[LeftOut]]:
        """Write the shards of a folder; return their paths, and the files that are left out.

        The folder is empty, or has the shards that an interrupted call with the same arguments has completed: they are
        kept. progress: called with the number of pairs read, and the total.
        """
        io.make_folder(folder)
        order: Sequence[int] = range(len(pairs))
        if self.shuffle_seed is not None:
            order = np.random.default_rng(self.shuffle_seed).permutation(len(pairs)).tolist()
        parts = [order[first : first + self.samples_a_shard] for first in range(0, len(pairs), self.samples_a_shard)]
        # Few shards are written by few processes, each of which reads images in further processes.
        processes = max(1, min(self.processes, len(pairs) // _PAIRS_A_PROCESS))
        writers = max(1, min(processes, len(parts)))
        tasks = ((number, [pairs[place] for place in places]) for number, places in enumerate(parts))
        shards = map_in_children(partial(self._write_shard, folder, processes // writers), tasks, writers, 1)
        written, left_out, done = list[str](), list[LeftOut](), 0
        for places, (path, stats) in zip(parts, shards, strict=True):
            done += len(places)
            progress(done, len(pairs))
            left_out += [LeftOut(Path(name), kind, reason) for name, kind, reason in stats.get("left_out", ())]
            written += [str(path)] if stats["successes"] else []
        return written, left_out

    def _write_shard(
        self, folder: Path, processes: int, task: tuple[int, Sequence[AnyPair]]
    ) -> tuple[Path, dict[str, Any]]:
        """Write a shard and then its statistics, unless it has them; return its path and statistics."""
        number, pairs = task
        path, left_out = folder / f"{number:05d}.tar", list[tuple[str, str, str]]()
        if not (record := path.with_name(f"{path.stem}_stats.json")).is_file():
            with io.whole(path) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
                prepared = map_in_children(self._prepare, pairs, processes, _WRITE_CHUNK)
                for key, sample in enumerate(prepared, number * self.samples_a_shard):
                    if isinstance(sample, LeftOut):
                        left_out.append((str(sample.path), sample.kind, sample.reason))
                        continue
                    suffix, encoded, facts = sample
                    text = json.dumps(facts, default=str).encode()
                    for extension, content in {suffix: encoded, "txt": facts["caption"].encode(), "json": text}.items():
                        entry = tarfile.TarInfo(f"{key:09d}.{extension}")
                        entry.size = len(content)
                        archive.addfile(entry, BytesIO(content))
            stats = {"successes": len(pairs) - len(left_out), **({"left_out": left_out} if left_out else {})}
            io.write_json(record, stats)
        stats = io.read_json(record, 2**30, f"remove {folder} to write it again", fields={"successes": int})
        if not stats["successes"]:
            path.unlink(missing_ok=True)
        return path, stats

    def _prepare(self, pair: AnyPair) -> tuple[str, bytes, dict[str, Any]] | LeftOut:
        """Return extension and bytes of the image and the .json of a pair, or why training cannot use it."""
        try:
            captions = usable_captions(pair)
            facts = {**pair.facts, "caption": captions[0], "captions": captions, "file": pair.image.name}
            encoded, side = pair.read_image(), self.shortest_side
            header = read_header(encoded, _LARGEST if side else self.max_pixels)
            scale = min(1.0, side / min(header.height, header.width)) if side else 1.0
            width, height = max(1, round(header.width * scale)), max(1, round(header.height * scale))
            if width * height > self.max_pixels:
                reason = f"{width} x {height} pixels, more than --max-pixels {self.max_pixels}"
                raise BadSampleError("enormous_image", reason)
            pixels = header.decode(1)
            if scale == 1 and self.image_format in (None, header.extension):
                extension = pair.image.suffix[1:].lower()
                return extension if extension in IMAGE_EXTENSIONS else header.extension, encoded, facts
            stream, image, extension = BytesIO(), Image.fromarray(pixels), self.image_format or "jpg"
            if scale < 1:
                image = image.resize((width, height), Image.Resampling.LANCZOS)
            try:
                # One thread, for AVIF: the same bytes on any machine.
                form = Image.registered_extensions()[f".{extension}"]
                image.save(stream, form, quality=self.quality, max_threads=1)
            except (OSError, ValueError) as error:  # such as the side of a WebP above 16,383 pixels
                raise BadSampleError("unencodable_image", f"{width} x {height} as {extension}: {error}") from error
        except BadSampleError as error:
            return LeftOut(pair.image, error.kind, error.reason)
        return extension, stream.getvalue(), facts
