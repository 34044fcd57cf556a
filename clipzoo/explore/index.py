"""An index of images: embeddings in blocks on disk, searched by captions.

    <folder>/index.json             model, images, block size and digests
    <folder>/names.json             names of the images
    <folder>/blocks/00000.safetensors    embeddings of a block of images

A block is written completely or not at all: an interrupted build continues with the missing blocks.
"""

from __future__ import annotations

import glob
import hashlib
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import braceexpand
import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import Subset

from clipzoo import io
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError, number_of, one_message
from clipzoo.evaluation.datasets.dataset import ImageFile, ImageFiles, Images
from clipzoo.evaluation.datasets.tar import tar_samples
from clipzoo.evaluation.scoring import exact_products
from clipzoo.evaluation.suite import model_key
from clipzoo.exports.files import save_weights
from clipzoo.exports.hub import load
from clipzoo.heads.base import Head
from clipzoo.loading import LoadedModel, read_weights
from clipzoo.types import Embedding, PointSet, as_captions, concatenate

FILE, NAMES = "index.json", "names.json"
BLOCK = 256
"""Images in a block."""
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")
FIELDS = {"model": str, "images": str, "count": int, "block": int, "key": str, "names": str}
REMEDY = "build the index again in another folder"


class Match(NamedTuple):
    """An image and its logit with the caption."""

    name: str
    score: float


@dataclass(frozen=True)
class Gallery:
    """Images with names: paths below the folder, or SHARD.tar/KEY. source: their origin."""

    source: str
    names: list[str]
    images: Images | Subset[Image]


class SearchIndex:
    """Embeddings of images, and the model that embeds captions for them."""

    def __init__(self, folder: str | Path, model: LoadedModel | None = None, trust: str | Sequence[str] = ()) -> None:
        """Open a complete index. model: None loads the one that built it. trust: as in `clipzoo.load`.

        Raises ConfigError if the index is incomplete or damaged, or the model has other weights than its builder.
        """
        self.folder = Path(folder)
        facts = _facts(self.folder)
        blocks = math.ceil(facts["count"] / BLOCK)
        missing = blocks - len(list((self.folder / "blocks").glob("*.safetensors")))
        if missing > 0:
            raise ConfigError(f"{folder} lacks {missing} blocks: run the same clipzoo index again to complete it")
        most = 2**13 * facts["count"]  # bytes
        self.names: list[str] = io.read_json(self.folder / NAMES, most, REMEDY, list)
        if _digest(self.names) != facts["names"]:
            raise io.DamagedFileError(self.folder / NAMES, f"has other names than {FILE}", REMEDY)
        self.model = model or load(facts["model"], trust=trust)
        if model_key(self.model, ()) != facts["key"]:
            raise ConfigError(f"{folder} was built with other weights of {facts['model']}: {REMEDY}")
        embeddings = [_read(_block(self.folder, number)) for number in range(blocks)]
        with one_message(f"{folder} is damaged", REMEDY):
            self.images = concatenate(embeddings)
            # Fails for embeddings of another width or type.
            self._score(self.embed("a picture"), torch.arange(1))
        if not len(self.images) == len(self.names) == facts["count"]:
            fault = f"counts {facts['count']} images, but has {len(self.names)} names and {len(self.images)} embeddings"
            raise io.DamagedFileError(self.folder / FILE, fault, REMEDY)

    @cached_property
    def _candidates(self) -> Candidates:
        return Candidates(self.model.head, self.images)

    def __len__(self) -> int:
        return len(self.names)

    def search(
        self, captions: str | Sequence[str], count: int = 10, candidates: int | None = None
    ) -> list[list[Match]]:
        """Return the best images of each caption, best first.

        candidates: for a head whose score is not an inner product (KME-CLIP), number of images with the best
            approximate scores that are scored exactly; None scores all images. The search of other heads is exact.
        """
        rows = [self.nearest(self.embed(caption), count, candidates) for caption in as_captions(captions)]
        return [[Match(self.names[row], score) for row, score in best] for best in rows]

    def nearest(self, query: Embedding, count: int = 10, candidates: int | None = None) -> list[tuple[int, float]]:
        """Return rows and logits of the images that are most similar to an embedding, best first.

        query: one row, the embedding of a caption, or of an image, whose neighbours are then returned.
        """
        if self.model.head.is_inner_product:
            rows = self._candidates.best(query, min(count, len(self)))
        elif candidates is None or candidates >= len(self):
            rows = torch.arange(len(self))
        else:
            rows = self._candidates.best(query, min(max(count, candidates), len(self)))
        best = self._score(query, rows).sort(descending=True, stable=True)
        return [(int(rows[place]), float(best.values[rank])) for rank, place in enumerate(best.indices[:count])]

    def recall(self, captions: str | Sequence[str], count: int = 10, candidates: int | None = None) -> float:
        """Return the share of the best `count` images of some captions that `search` finds; 1 if it is exact."""
        approximate, best = (self.search(captions, count, number) for number in (candidates, None))
        pairs = [(place, match.name) for place, matches in enumerate(best) for match in matches]
        hits = {(place, match.name) for place, matches in enumerate(approximate) for match in matches}
        return sum(pair in hits for pair in pairs) / len(pairs)

    @torch.no_grad()
    def embed(self, caption: str) -> Embedding:
        """Return the embedding of a caption, one row."""
        return self.model.encode_text(caption)

    @torch.no_grad()
    def _score(self, text: Embedding, rows: Tensor) -> Tensor:
        """Return the logits of some images, [rows], computed in blocks."""
        with exact_products():
            parts = [self.model.similarity(self.images[block], text)[:, 0] for block in rows.split(BLOCK)]
        return torch.cat(parts)


class Candidates:
    """Images by the inner products of `Head.search_factors`, computed by faiss if it is installed."""

    def __init__(self, head: Head, images: Embedding) -> None:
        with torch.no_grad(), exact_products():
            self._factors = partial(head.search_factors, basis=head.search_basis(images))
            blocks = torch.arange(len(images)).split(BLOCK)
            vectors = [self._factors(images[block], images[:1])[0].float() for block in blocks]
        self._vectors = torch.cat(vectors)  # [n, f]
        self._faiss: Any = None
        if find_spec("faiss") is not None:
            import faiss

            self._faiss = faiss.IndexFlatIP(self._vectors.shape[1])
            self._faiss.add(self._vectors.numpy())

    def best(self, text: Embedding, count: int) -> Tensor:
        """Return the rows of the `count` best images of one caption, best first."""
        with torch.no_grad(), exact_products():
            query = self._factors(text[:0], text)[1].float()
            if self._faiss is not None:
                return torch.from_numpy(self._faiss.search(query.numpy(), count)[1][0])
            products = self._vectors @ query[0]
        return products.sort(descending=True, stable=True).indices[:count]


def read_gallery(source: str) -> Gallery:
    """List the images below a folder, or of the shards of a folder or a pattern. Raises ConfigError without images."""
    folder = Path(source)
    if folder.is_dir():
        tars = sorted(folder.glob("*.tar"))
    else:
        tars = [Path(path) for part in braceexpand.braceexpand(source) for path in sorted(glob.glob(part)) or [part]]
        if missing := [path for path in tars if not path.exists()]:
            raise ConfigError(f"{missing[0]} does not exist")
    if tars:
        images = {
            f"{path.name}/{sample.key}": sample.image
            for path in tars
            for sample in tar_samples(path, "remove it or make it again", unterminated=True)
        }
    else:
        files = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in EXTENSIONS and path.is_file()]
        images = {str(path.relative_to(folder)): ImageFile(path) for path in files}
    if not images:
        raise ConfigError(f"{source} has no images ({', '.join(EXTENSIONS)}): give a folder of images, or tar shards")
    return Gallery(source, list(images), ImageFiles(list(images.values())))


def build_index(
    model: LoadedModel,
    source: str,
    images: str | Gallery,
    folder: str | Path,
    world: World = World(),
    report: Callable[[str], None] = lambda line: None,
    replace: bool = False,
) -> SearchIndex | None:
    """Embed the images of a folder or of tar shards, and return the index on the first rank. Collective.

    source: name for `clipzoo.load`. images: a gallery, or see `read_gallery`. report: takes progress messages. replace:
    remove an index of other images or another model, which raises ConfigError otherwise. Blocks that exist are kept.
    """
    folder, gallery = Path(folder), read_gallery(images) if isinstance(images, str) else images
    facts = facts_of(model, source, gallery.source, gallery.names)

    def claim() -> None:
        before = _facts(folder) if (folder / FILE).exists() else None
        different = [key for key in ("images", "names", "key", "block") if before and before[key] != facts[key]]
        if different and not replace:
            content = "another model" if different == ["key"] else "other images"
            raise ConfigError(f"{folder} has an index of {content}: give another --output, or remove the folder")
        if different:
            shutil.rmtree(folder)
        if different or before is None:
            io.write_json(folder / NAMES, gallery.names)
            io.write_json(folder / FILE, facts)

    world.run_on_first(claim)
    blocks = range(world.rank, math.ceil(len(gallery.names) / BLOCK), world.size)
    missing = [number for number in blocks if not _block(folder, number).exists()]
    for done, number in enumerate(missing, start=1):
        rows = range(number * BLOCK, min((number + 1) * BLOCK, len(gallery.names)))
        pixels = torch.stack([model.transform(gallery.images[row]) for row in rows])
        with torch.no_grad(), exact_products():
            write_block(folder, number, model.encode_image(pixels))
        report(f"{done} of {len(missing)} blocks of {number_of(BLOCK, 'image')}")
    world.barrier()
    return SearchIndex(folder, model) if world.is_first else None


def facts_of(model: LoadedModel, source: str, images: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the content of index.json. source, images: origins of the model and of the images."""
    sizes = {"count": len(names), "block": BLOCK}
    return {"model": source, "images": images, **sizes, "key": model_key(model, ()), "names": _digest(names)}


def write_block(folder: Path, number: int, embedding: Embedding) -> None:
    """Write the embeddings of the images from `number * BLOCK` on."""
    tensors = vars(embedding) if isinstance(embedding, PointSet) else {"embedding": embedding}
    save_weights(tensors, _block(folder, number))


def _block(folder: Path, number: int) -> Path:
    return folder / "blocks" / f"{number:05d}.safetensors"


def _facts(folder: Path) -> dict[str, Any]:
    facts = io.read_json(folder / FILE, io.MB, REMEDY, fields=FIELDS)
    if facts["block"] != BLOCK or facts["count"] < 1:
        raise io.DamagedFileError(folder / FILE, f"has {facts['count']} images in blocks of {facts['block']}", REMEDY)
    return facts


def _digest(names: Sequence[object]) -> str:
    return hashlib.sha256("\n".join(map(str, names)).encode(errors="surrogateescape")).hexdigest()


def _read(path: Path) -> Embedding:
    tensors = read_weights(path)
    for name, tensor in tensors.items():
        # A point without weight has the logarithm -inf.
        sizes = tensor if name == "log_weights" else tensor.abs()
        if not tensor.is_floating_point() or not bool((sizes < math.inf).all()):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise io.DamagedFileError(path, f"holds {kind} as {name}, or numbers that are not finite", REMEDY)
    match sorted(tensors):
        case ["log_weights", "points"]:
            return PointSet(tensors["points"], tensors["log_weights"])
        case ["embedding"]:
            return tensors["embedding"]
    raise io.DamagedFileError(path, f"holds {', '.join(sorted(tensors)) or 'no tensors'}", REMEDY)
