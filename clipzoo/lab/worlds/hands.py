"""Get drawings of the same things by many hands: train on some hands and things, evaluate on the others.

clipzoo hands                                     data/hands: pictures, training shards and evaluation datasets
clipzoo hands --list                              the sources: packages, licences, authors

npm and apt-get fetch the packages by name (350 MB, kept in data/npm); a source that they cannot fetch is skipped by
name. Finished parts are reused, so that an interrupted command resumes. SVG needs the extra svg.

<root>/pictures/HAND/KEY.png      pictures of one hand, on white, 96 pixels
<root>/pictures/HAND/drawings.jsonl   their words: name, keywords, category, author, names in other languages
<root>/train/00000.tar ...        the training split: captions, keywords, category, group, source, licence, author
<root>/downstream/DATASET/        evaluation datasets of held-out hands and things, see docs/benchmarks/hands.md
<root>/downstream/hands.json      numbers and digests of the splits
"""

from __future__ import annotations

import argparse
import hashlib
import html
import io as streams
import json
import os
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from clipzoo import io
from clipzoo.cli.arguments import Progress, number_in, output_folder
from clipzoo.config.vocabulary import Processes
from clipzoo.data import write as writer
from clipzoo.data.captions import has_text
from clipzoo.data.maps.engines import map_in_children
from clipzoo.errors import ConfigError, installation
from clipzoo.evaluation.datasets import own, tar
from clipzoo.evaluation.datasets.dataset import Example, png
from clipzoo.lab.worlds import packages
from clipzoo.lab.worlds.packages import SOURCES, fetch, members

SIZE = 96
"""Side of a picture in pixels."""
PLACES = {"to the left of": ((0, 1), (2, 1)), "above": ((1, 0), (1, 2))}
"""Relation of two pictures -> their corners on the canvas, in quarters of its side."""
EMOJI = ("google", "twitter", "openmoji")
Files = Mapping[str, bytes]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, shown = parser.add_argument, "(default: %(default)s)"
    add("--root", type=output_folder, default=Path("data/hands"), help=f"output folder {shown}")
    add("--packages", type=output_folder, default=Path("data/npm"), help=f"folder of the packages {shown}")
    add("--processes", type=number_in(Processes), default=os.cpu_count() or 1, help="default: all cores")
    add("--list", action="store_true", help="print the sources and end")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    facts, known = io.read_yaml(SOURCES), packages.packages()
    package_of = {hand: known[entry["package"]] for hand, entry in facts["hands"].items()}
    if options.list:
        for hand, package in package_of.items():
            print(f"{hand}: {facts['hands'][hand]['pictures']:,} pictures, {package.attribution}")
        return
    words = fetch([known[name] for name in facts["words"]], options.packages, _say)
    sources, missing = dict[str, Path](), dict[str, str]()
    for hand, package in package_of.items():
        try:
            (sources[hand],) = fetch([package], options.packages, _say)
        except ConfigError as error:
            missing[hand] = str(error)
            _say(f"{hand} is skipped: {error}")
    if not sources:
        raise ConfigError("no source can be had: " + "; ".join(missing.values()))
    ensure_hands(options.root, sources, words, options.processes)
    splits = io.read_json(options.root / "downstream" / "hands.json", io.MB)["splits"]
    for name, split in splits.items():
        _say(f"{name}: {split['pictures']:,} pictures of {split['things']:,} things")
    if {name: split["digest"] for name, split in splits.items()} != facts["splits"]:
        cause = f"they lack {', '.join(missing)}" if missing else "the sources or the code differ"
        _say(f"these are not the splits of the benchmark: {cause}")
    _say("licences: " + "; ".join(package_of[hand].attribution for hand in sources))


def _say(text: str) -> None:
    print(f"== hands: {text}", flush=True)


@dataclass(frozen=True)
class Drawing:
    """A picture of a hand with its words.

    key: name of its file. picture: SVG or PNG; empty once it is written. names: by language besides English. group:
    equal for drawings of the same thing. hand: added when it is read again.
    """

    key: str
    name: str
    picture: bytes = b""
    keywords: Sequence[str] = ()
    category: str = ""
    author: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    hand: str = ""

    @property
    def group(self) -> str:
        return normalised(self.name)

    @property
    def uid(self) -> str:
        return f"{self.hand}/{self.key}"

    @property
    def captions(self) -> list[str]:
        """The name; the name with up to five keywords; the name with the category."""
        keywords = [word for word in self.keywords if normalised(word) != self.group][:5]
        with_keywords = ", ".join([self.name, *keywords])
        return list(dict.fromkeys([self.name, with_keywords, f"{self.name}, {self.category}".removesuffix(", ")]))


def normalised(name: str) -> str:
    """Return the words of a name in lower case, without accents, punctuation and articles."""
    letters = unicodedata.normalize("NFKD", name.replace("_", " ")).casefold()
    words = re.findall(r"\w+", "".join(letter for letter in letters if not unicodedata.combining(letter)))
    return " ".join([word for word in words if word not in ("a", "an", "the")] or words)


def spaced(key: str) -> str:
    return " ".join(re.split(r"[\s_-]+", key.strip("_- ")))


# Words, and the drawings of a package.


@dataclass(frozen=True)
class Words:
    """Unicode's and CLDR's words. names, groups: by characters, without the mark for coloured pictures, in Unicode's
    order. keywords, translations: by `normalised` name."""

    names: dict[str, str]
    groups: dict[str, str]
    keywords: dict[str, Sequence[str]]
    translations: dict[str, Mapping[str, str]]


def read_words(files: Sequence[Path], languages: Sequence[str]) -> Words:
    """Read the packages of `words` in hands.yaml."""
    ((_, listed),) = members(files[0], r"data-by-emoji\.json")
    known = {language: dict[str, Mapping[str, list[str]]]() for language in ("en", *languages)}
    for file in files[1:]:
        for path, content in members(file, rf"annotations(Derived)?/({'|'.join(known)})/annotations\.json"):
            (entry,) = json.loads(content).values()
            known[path.split("/")[1]] |= {plain(key): value for key, value in entry["annotations"].items()}
    words = Words({}, {}, {}, {})
    for key, facts in json.loads(listed).items():
        characters, name = plain(key), facts["name"]
        if all("\U0001f1e6" <= character <= "\U0001f1ff" for character in characters):
            # A country's flag is two letters of its code.
            name = f"flag of {name.removeprefix('flag ')}"
        words.names[characters], words.groups[characters], group = name, facts["group"], normalised(name)
        entries = {language: texts.get(characters, {}) for language, texts in known.items()}
        words.keywords[group] = entries.pop("en").get("default", ())
        words.translations[group] = {language: texts["tts"][0] for language, texts in entries.items() if "tts" in texts}
    return words


def plain(characters: str) -> str:
    """Return characters without the one that asks for a coloured picture; sources differ in where they write it."""
    return characters.replace("\ufe0f", "")


def emoji(files: Files, words: Words) -> Iterator[Drawing]:
    """Vendors' emoji, one picture for each code point, without skin tones."""
    paths = {plain("".join(chr(int(code, 16)) for code in Path(path).stem.split("-"))): path for path in files}
    for characters, name in words.names.items():
        if path := paths.get(characters):
            yield Drawing(Path(path).stem, name, files[path], category=words.groups[characters])


def openmoji(files: Files, words: Words) -> Iterator[Drawing]:
    """OpenMoji without skin tones, and its own signs."""
    for entry in json.loads(files["data/openmoji.json"]):
        characters, picture = plain(entry["emoji"]), files.get(f"color/svg/{entry['hexcode']}.svg")
        if picture is not None and not entry["skintone"]:
            keywords = [word.strip() for key in ("openmoji_tags", "tags") for word in entry[key].split(",")]
            category = words.groups.get(characters, spaced(entry["group"]))
            name = words.names.get(characters, entry["annotation"])
            yield Drawing(entry["hexcode"], name, picture, keywords, category, entry["openmoji_author"])


def iconify(files: Files, words: Words) -> Iterator[Drawing]:
    """Sets of icons in Iconify's JSON, without the further styles of an icon."""
    icons, metadata = (json.loads(files[f"{name}.json"]) for name in ("icons", "metadata"))
    styles = tuple(f"-{style}" for style in metadata.get("suffixes", ()) if style)
    categories = {key: name for name, keys in metadata.get("categories", {}).items() for key in keys}
    for key, icon in icons["icons"].items():
        if not (styles and key.endswith(styles)):
            box = " ".join(str(icon.get(side, icons[side])) for side in ("width", "height"))
            svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {box}">{icon["body"]}</svg>'
            yield Drawing(key, spaced(key), svg.encode(), category=categories.get(key, ""))


def tabler(files: Files, words: Words) -> Iterator[Drawing]:
    for key, entry in json.loads(files["icons.json"]).items():
        tags = [str(tag) for tag in entry["tags"]]
        yield Drawing(key, spaced(key), files.get(f"icons/outline/{key}.svg", b""), tags, entry["category"])


def lucide(files: Files, words: Words) -> Iterator[Drawing]:
    for key, tags in json.loads(files["tags.json"]).items():
        yield Drawing(key, spaced(key), files.get(f"icons/{key}.svg", b""), tags)


def simple_icons(files: Files, words: Words) -> Iterator[Drawing]:
    for entry in json.loads(files["data/simple-icons.json"]):
        picture = files.get(f"icons/{entry['slug']}.svg", b"")
        yield Drawing(entry["slug"], entry["title"], picture, entry.get("aliases", {}).get("aka", ()), "brand")


def font_awesome(files: Files, words: Words) -> Iterator[Drawing]:
    import yaml

    groups = yaml.safe_load(files["metadata/categories.yml"])
    categories = {key: group["label"] for group in groups.values() for key in group["icons"]}
    for key, entry in json.loads(files["metadata/icon-families.json"]).items():
        style = next(style for style in ("solid", "brands", "regular") if style in entry["svgs"]["classic"])
        picture, terms = entry["svgs"]["classic"][style]["raw"].encode(), map(str, entry["search"]["terms"])
        category = "brand" if style == "brands" else categories.get(key, "")
        yield Drawing(key, entry["label"], picture, list(terms), category)


def openclipart(files: Files, words: Words) -> Iterator[Drawing]:
    """Clip art. Titles that several files share are those of collections: the name of the file names the thing."""
    texts = {path: content.decode("utf-8", "replace") for path, content in files.items()}
    titles = {path: _first(r"<dc:title>(.*?)</dc:title>", text) for path, text in texts.items()}
    counts = Counter(titles.values())
    for path, text in texts.items():
        folder, _, stem = path.removeprefix("openclipart/svg/").removesuffix(".svg").rpartition("/")
        author = _first(r"<dc:creator>.*?<dc:title>(.*?)</dc:title>", text)
        title = titles[path]
        if counts[title] > 1 or not title or "clipart" in title.lower():
            # TITLE_AUTHOR_01, with the author's name cut off.
            title = re.sub(r"(_[a-z]?\d+)+$", "", stem, flags=re.I)
            for word in author.lower().split():
                title = re.sub(rf"_{re.escape(word[:4])}.*$", "", title, flags=re.I) if len(word) > 3 else title
        keywords = [spaced(html.unescape(word)) for word in re.findall(r"<rdf:li>\s*([^<]+?)\s*</rdf:li>", text)]
        kept = [word for word in keywords if word != "hash" and not re.match(r"0x|\d+$", word)]
        category = spaced(folder.split("/")[0])
        yield Drawing(f"{folder}/{stem}", spaced(title), files[path], kept, category, author)


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.DOTALL)
    return " ".join(html.unescape(found[1]).split()) if found else ""


def tuxpaint(files: Files, words: Words) -> Iterator[Drawing]:
    """Stamps: a sentence in English, its translations, and folders as categories."""
    locales = {locale: language for language, locale in io.read_yaml(SOURCES)["languages"].items()}
    for path, content in files.items():
        stem = path.removesuffix(".txt")
        picture = files.get(f"{stem}.svg") or files.get(f"{stem}.png")
        if stem != path and picture:
            english, *others = content.decode("utf-8", "replace").splitlines() or [""]
            translated = [re.fullmatch(r"(\w+)\.utf8=(.*\w.*)", line) for line in others]
            names = {locales[line[1]]: line[2].strip(" .。।") for line in translated if line and line[1] in locales}
            key, name = stem.removeprefix("tuxpaint/stamps/"), re.sub(r"^(An?|The) ", "", english.strip(" ."))
            folders = [spaced(part) for part in key.split("/")[:-1]]
            yield Drawing(key, name, picture, folders[::-1], folders[0], names=names)


LAYOUTS: Mapping[str, Callable[[Files, Words], Iterator[Drawing]]] = {
    layout.__name__: layout
    for layout in (emoji, openmoji, iconify, tabler, lucide, simple_icons, font_awesome, openclipart, tuxpaint)
}
"""Readers of packages: files and words -> drawings."""


def render(picture: bytes) -> bytes | None:
    """Return an SVG or PNG as PNG, whole and centred on a white square of SIZE pixels; None if it shows nothing.

    Text in an SVG is left out, because fonts differ among machines. Pictures without a pixel darker than 240 of 255
    show nothing, and so do those that refer to other files.
    """
    try:
        if not picture.startswith(b"\x89PNG"):
            import resvg_py

            text = picture.decode("utf-8", "replace")
            if re.search(r"<image\b[^>]*href\s*=\s*[\"'](?!data:|#)", text):
                return None
            picture = resvg_py.svg_to_bytes(svg_string=text, width=SIZE, height=SIZE, dpi=96, skip_system_fonts=True)
        image = Image.open(streams.BytesIO(picture)).convert("RGBA")
    except (ValueError, OSError, Image.DecompressionBombError):
        return None
    image = ImageOps.contain(image, (SIZE, SIZE), Image.Resampling.LANCZOS)
    canvas = Image.new("RGB", (SIZE, SIZE), "white")
    canvas.paste(image, ((SIZE - image.width) // 2, (SIZE - image.height) // 2), image)
    return None if np.asarray(canvas).min() > 240 else png(canvas)


# The three parts of the dataset.


def ensure_hands(root: Path, sources: Mapping[str, Path], words: Sequence[Path], processes: int) -> None:
    """Make pictures, training shards and evaluation datasets below `root`, unless they are complete and unchanged.

    sources: file of the package of each hand. words: files of the packages of words. Raises ConfigError.
    """
    try:
        import resvg_py
    except ImportError:
        raise ConfigError(f"drawings in SVG need resvg_py: {installation('svg')}") from None
    facts = io.read_yaml(SOURCES)
    code = [SOURCES, *(Path(str(module.__file__)) for module in (sys.modules[__name__], packages, writer, own, tar))]
    recipe = {"code": io.digest_of(*code), "renderer": f"resvg_py {resvg_py.__version__}, Pillow {Image.__version__}"}
    recipe["words"] = io.digest_of(*words)
    read = cache(lambda: read_words(words, list(facts["languages"])))
    for hand, source in sources.items():

        def draw(folder: Path, hand: str = hand, source: Path = source) -> None:
            files = dict(members(source, facts["hands"][hand]["files"]))
            write_pictures(folder, hand, LAYOUTS[facts["hands"][hand]["layout"]](files, read()), read(), processes)

        place, own_recipe = io.below(root / "pictures", hand), {**recipe, "source": io.digest_of(source)}
        if io.ensure_folder(place, "hand.json", own_recipe, draw, "pictures"):
            _say(f"{hand} is drawn")
    recipe["sources"] = io.digest_of(*sources.values())
    drawings = read_drawings(root / "pictures", sources)
    splits = split_drawings(drawings, facts["held_out"]["hands"], facts["held_out"]["things"])
    train: Callable[..., None] = partial(write_train, processes=processes)
    for name, write in {"train": train, "downstream": write_downstream}.items():
        _say(f"{root / name}")
        fill = partial(write, pictures=root / "pictures", splits=splits)
        io.ensure_folder(root / name, "files.json", recipe, fill, f"the {name} part of the drawings")


def write_pictures(folder: Path, hand: str, drawings: Iterable[Drawing], words: Words, processes: int) -> None:
    """Write the pictures of a hand and drawings.jsonl; drawings without a name or twice the same are left out."""
    named = [drawing for drawing in drawings if drawing.picture and has_text(drawing.name)]
    rows, progress = io.JsonLines(folder / "drawings.jsonl"), Progress("hands", f"pictures of {hand}")
    seen, keys = set[tuple[str, bytes]](), set[str]()
    pictures = map_in_children(render, [drawing.picture for drawing in named], processes, 50)
    for done, (drawing, picture) in enumerate(zip(named, pictures, strict=True), start=1):
        progress(done, len(named))
        if picture is None or (drawing.group, picture) in seen:
            continue
        seen.add((drawing.group, picture))
        key = re.sub(r"[^0-9a-z-]+", "_", drawing.key.lower()).strip("_-")[:80] or "picture"
        while key in keys:
            key += "_"
        keys.add(key)
        keywords = [" ".join(word.split()) for word in drawing.keywords or words.keywords.get(drawing.group, ())]
        kept = list(dict.fromkeys(word for word in keywords if has_text(word)))
        names = {**words.translations.get(drawing.group, {}), **drawing.names}
        io.below(folder, f"{key}.png").write_bytes(picture)
        rows.append({**asdict(drawing), "key": key, "picture": "", "keywords": kept, "names": names})
    rows.close()


def read_drawings(pictures: Path, hands: Iterable[str]) -> list[Drawing]:
    """Read the words of all pictures of hands."""
    rows = {hand: io.read_json_lines(io.below(pictures, hand) / "drawings.jsonl", io.ANY_SIZE) for hand in hands}
    return [Drawing(**{**row, "picture": b"", "hand": hand}) for hand, lines in rows.items() for row in lines]


def split_drawings(drawings: Sequence[Drawing], hands: Sequence[str], things: float) -> dict[str, list[Drawing]]:
    """Split drawings by hand and thing.

    hands: the held-out ones. things: share of the groups that are held out; a digest of the group decides.

    Returns:
        train: neither is held out. hands: held-out hands, things of train. things: hands of train, held-out things.
        both: held-out hands, things that are not in train.
    """
    known = {drawing.group for drawing in drawings if drawing.hand not in hands}
    known = {group for group in known if int(hashlib.sha256(group.encode()).hexdigest()[:8], 16) >= things * 2**32}
    names = {(True, True): "train", (False, True): "hands", (True, False): "things", (False, False): "both"}
    splits: dict[str, list[Drawing]] = {name: [] for name in names.values()}
    for drawing in drawings:
        splits[names[drawing.hand not in hands, drawing.group in known]].append(drawing)
    return splits


def write_train(folder: Path, pictures: Path, splits: Mapping[str, Sequence[Drawing]], processes: int = 1) -> None:
    """Write the training shards."""
    facts, known = io.read_yaml(SOURCES)["hands"], packages.packages()
    pairs = []
    for drawing in splits["train"]:
        package = known[facts[drawing.hand]["package"]]
        row: dict[str, str | list[str]] = {
            "uid": drawing.uid, "group": drawing.group, "keywords": list(drawing.keywords),
            "category": drawing.category, "source": package.pinned, "licence": package.licence,
            "author": drawing.author or package.author, "texts": [*drawing.captions, *drawing.names.values()],
            **{f"name_{language}": name for language, name in drawing.names.items()},
        }  # fmt: skip
        pairs.append(writer.Pair(io.below(pictures, f"{drawing.uid}.png"), drawing.captions, facts=row))
    shard_writer = writer.ShardWriter(1000, shuffle_seed=0, shortest_side=None, processes=processes)
    _, left_out = shard_writer.write(pairs, folder, progress=Progress("hands", "training pictures"))
    if left_out:
        raise ConfigError(f"a picture cannot be used: {left_out[0]}")


def write_downstream(folder: Path, pictures: Path, splits: Mapping[str, Sequence[Drawing]]) -> None:
    """Write the evaluation datasets, whose class names are the `normalised` names, and hands.json."""

    def path(drawing: Drawing) -> Path:
        return io.below(pictures, f"{drawing.uid}.png")

    def classes(name: str, part: Iterable[tuple[Drawing, str]]) -> None:
        images = [own.OwnImage(path(drawing), "test", text) for drawing, text in part]
        names = {image.class_name for image in images}
        if len(names) > 1:
            own.make_classification(own.Source(images, names), io.below(folder, name), ["{c}"], "top1")

    def labels(name: str, part: Iterable[tuple[Drawing, Sequence[str]]]) -> None:
        rows = [(drawing, texts) for drawing, texts in part if texts]
        names = sorted({text for _, texts in rows for text in texts})
        examples = ((path(drawing).read_bytes(), [names.index(text) for text in texts]) for drawing, texts in rows)
        if len(names) > 1:
            tar.write_classification(
                io.below(folder, name), class_names=names, templates=["{c}"], metric="mean_average_precision",
                recipe="drawings of hands, ranked for each class", splits={"test": examples},
            )  # fmt: skip

    for name in ("hands", "things", "both"):
        classes(f"names_{name}", ((drawing, drawing.group) for drawing in splits[name]))
    seen = splits["hands"]
    classes("categories", ((drawing, drawing.category) for drawing in seen if drawing.hand in EMOJI))
    for language in io.read_yaml(SOURCES)["languages"]:
        classes(f"names_{language}", ((one, one.names[language]) for one in seen if language in one.names))
    words = {drawing.uid: list({normalised(word) for word in drawing.keywords}) for drawing in seen}
    counts = Counter(word for texts in words.values() for word in texts)
    common = {word for word, count in counts.items() if word and count >= 10}
    labels("keywords", ((one, sorted(common.intersection(words[one.uid]))) for one in seen))
    new = [*splits["things"], *splits["both"]]
    hands_of = defaultdict[str, set[str]](set)
    for drawing in new:
        hands_of[drawing.group].add(drawing.hand)
    labels("several", ((one, [one.group]) for one in new if len(hands_of[one.group]) > 1))
    if seen:
        own.make_retrieval([writer.Pair(path(one), one.captions) for one in seen], io.below(folder, "pairs"))
    write_canvases(io.below(folder, "canvas"), [one for one in seen if one.hand in EMOJI], path)
    facts = {
        name: {"pictures": len(part), "things": len({one.group for one in part}), "digest": split_digest(part)}
        for name, part in splits.items()
    }
    io.write_json(folder / "hands.json", {"splits": facts})


def split_digest(part: Iterable[Drawing]) -> str:
    """Return a digest of the pictures' names and words."""
    lines = sorted(json.dumps([one.uid, one.group, one.captions, dict(one.names)], sort_keys=True) for one in part)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def write_canvases(folder: Path, drawings: Sequence[Drawing], path: Callable[[Drawing], Path]) -> None:
    """Write a choice dataset of two drawings on one canvas, drawn at random: 300 examples of the category "content",
    which differ in one of the things, and 300 of "order", which differ in their places."""
    draw = np.random.default_rng(0)
    things = list({drawing.group: drawing for drawing in drawings}.values())
    captions, canvases, examples = list[str](), list[bytes](), list[Example]()
    for number in range(600 if len(things) > 2 else 0):
        first, second, third = (things[place] for place in draw.choice(len(things), 3, replace=False).tolist())
        relation = list(PLACES)[number // 2 % len(PLACES)]
        pairs, word, category = ([(first, second), (first, third)], "and", "content")
        if number % 2:
            pairs, word, category = ([(first, second), (second, first)], relation, "order")
        for pair in pairs:
            canvas = Image.new("RGB", (SIZE, SIZE), "white")
            for drawing, (left, top) in zip(pair, PLACES[relation], strict=True):
                picture = Image.open(path(drawing)).resize((SIZE // 2, SIZE // 2), Image.Resampling.LANCZOS)
                canvas.paste(picture, (left * SIZE // 4, top * SIZE // 4))
            captions.append(f" {word} ".join(drawing.name for drawing in pair))
            canvases.append(png(canvas))
        rows = (2 * number, 2 * number + 1)
        examples.append(Example(rows, rows, frozenset({(0, 0), (1, 1)}), category))
    if examples:
        tar.write_choice(folder, "two drawings on one canvas", captions, examples, canvases.__getitem__)
