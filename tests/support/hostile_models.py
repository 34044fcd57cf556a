"""Weights, checkpoints, configurations and model directories that are made to harm whoever reads them.

A case writes its files into a folder and returns the call that reads them as a user would. Every call must end in a
ConfigError, or do no harm.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

import clipzoo
from clipzoo.encoders.huggingface import HuggingFaceText, HuggingFaceTokenizer
from clipzoo.initial import read_source
from clipzoo.training import checkpoint_files
from tests.support.evaluation_sets import config_of, model_of

Case = Callable[[Path], Callable[[], Any]]
METHODS = {"deflate": zipfile.ZIP_DEFLATED, "bzip2": zipfile.ZIP_BZIP2, "lzma": zipfile.ZIP_LZMA}
HUGE = 4 * 10**9
"""Bytes that a hostile file tries to take."""


def canary(folder: Path) -> Path:
    """Return the file that a hostile file creates if it is executed."""
    return folder / "canary"


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def written_run(folder: Path, changes: dict[str, Any] | None = None) -> Path:
    """Write a run with one checkpoint. changes: values of its configuration by dotted key. Returns the checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = copy.deepcopy(config_of("clip"))
    for key, value in (changes or {}).items():
        *names, last = key.split(".")
        node = plain
        for name in names:
            node = node[name]
        node[last] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(plain))
    state = {"model": model_of("clip").float().state_dict()}
    return checkpoint_files.save(folder / "checkpoints", 1, state, {"step": 1}, 1)


# Files in place of a .pt file.


def archive(path: Path, pickled: bytes, data: bytes = bytes(64), method: int = zipfile.ZIP_STORED) -> None:
    """Write a zip archive as torch.save does, with one storage."""
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("a/data.pkl", pickled)
        file.writestr("a/byteorder", b"little")
        file.writestr("a/data/0", data)
        file.writestr("a/version", b"3\n")


def tensor(numbers: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """Return the pickle of {"model": {"weight": a float tensor}}."""
    sizes, strides = (
        b"(" + b"".join(pickle.dumps(value, 2)[2:-1] for value in part) + b"t" for part in (shape, stride)
    )
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu"
    storage += pickle.dumps(numbers, 2)[2:-1] + b"tQ"
    rebuilt = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0" + sizes + strides + b"\x89ccollections\n"
    return b"\x80\x02}X\x05\0\0\0model}X\x06\0\0\0weight" + rebuilt + b"OrderedDict\n)RtRss."


def pickles(folder: Path) -> dict[str, bytes]:
    """Pickles in an archive of torch.save that allocate, repeat or recurse."""
    wide = (
        b"("
        + b"".join(pickle.dumps((f"{n}", n), 2)[2:-1].replace(b"q\0", b"").replace(b"q\x01", b"") for n in range(2000))
        + b"l"
    )
    ordered, model = b"ccollections\nOrderedDict\n", b"\x80\x02}X\x05\0\0\0model"
    huge = b"\x8a\x05" + struct.pack("<q", HUGE)[:5]
    return {
        "bytearray": model + b"c__builtin__\nbytearray\n" + huge + b"\x85Rs.",
        "uninitialised tensor": model + b"ctorch\nTensor\n" + huge + b"\x85Rs.",
        "list doubled 40 times": b"\x80\x02}X\x05\0\0\0model]q\0" + b"".join(
            b"]q%c(h%ch%ce" % (n + 1, n, n) for n in range(40)) + b"0" * 40 + b"s.",
        "tuple key doubled 60 times": b"\x80\x02})q\0"
        + b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(60)) + b"K\x01s.",
        "dictionary copied 30,000 times": b"\x80\x02}X\x05\0\0\0model](" + wide + b"q\x01" + ordered + b"q\x020" * 0
        + (ordered + b"h\x01\x85R") * 30_000 + b"es.",
        "nested 200,000 deep": b"\x80\x02}X\x05\0\0\0model" + b"]" * 200_000 + b"a" * 199_999 + b"s.",
        "tuples 200,000 deep": b"\x80\x02}X\x05\0\0\0modelN" + b"\x85" * 200_000 + b"s.",
        "unknown reference": b"\x80\x02h\x05.",
        "empty stack": b"\x80\x0200000.",
        "no end": b"\x80\x02}X\x05\0\0\0model",
        "persistent id of a number": b"\x80\x02K\x01Q.",
        "a list": b"\x80\x02].", "a number": b"\x80\x02K\x01.", "nothing": b"",
        "model is a number": model + b"K\x01s.",
        "integer keys": b"\x80\x02}X\x05\0\0\0model}K\x01K\x02ss.",
        "tensor of 10^12 equal numbers": tensor(16, (10**6, 10**6), (0, 0)),
        "storage larger than its member": tensor(HUGE, (HUGE,), (1,)),
        "negative size": tensor(16, (-4,), (1,)), "negative stride": tensor(16, (4,), (-1,)),
        "size beyond int64": tensor(16, (2**62, 2**62), (1, 1)),
        "offset beyond the storage": tensor(16, (4,), (2**40,)),
    }  # fmt: skip


def executing(folder: Path) -> dict[str, Any]:
    """Values whose pickle creates the canary."""
    place, touch = str(canary(folder)), f"touch {canary(folder)}"
    code = f"open({place!r}, 'w')"
    import builtins
    import pathlib
    import runpy
    import subprocess

    (folder / "module.py").write_text(code)
    return {
        "open": Call(open, place, "w"), "os.system": Call(os.system, touch), "eval": Call(builtins.eval, code),
        "exec": Call(builtins.exec, code),
        "Popen": Call(subprocess.Popen, touch, -1, None, None, None, None, None, True, True),
        "touch": Call(pathlib.Path.touch, canary(folder)), "run_path": Call(runpy.run_path, str(folder / "module.py")),
        "os.mkdir": Call(os.mkdir, place),
    }  # fmt: skip


def special_files() -> dict[str, Callable[[Path], Any]]:
    """Files that are no files, or no files of tensors."""

    def sparse(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(10**11)

    return {
        "a pipe": os.mkfifo, "a folder": os.mkdir, "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
        "/dev/random": lambda path: path.symlink_to("/dev/random"),
        "a dangling link": lambda path: path.symlink_to("nowhere"),
        "a link to itself": lambda path: path.symlink_to(path.name),
        "an empty file": lambda path: path.write_bytes(b""),
        "zeros": lambda path: path.write_bytes(bytes(10_000)), "100 GB of holes": sparse,
        "a page": lambda path: path.write_text("<html>" * 1000), "no permission": lambda path: path.touch(0),
    }  # fmt: skip


def damaged_archives() -> dict[str, Callable[[Path], Any]]:
    """Archives whose members are packed, overlap, or are cut off."""

    def cut(share: float) -> Callable[[Path], None]:
        def write(path: Path) -> None:
            torch.save({"model": {"weight": torch.zeros(1000)}}, path)
            path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])

        return write

    def overlapping(path: Path) -> None:
        """200 entries for the same 100 kB."""
        archive(path, pickle.dumps({"model": {}}, 2), bytes(100_000))
        content = path.read_bytes()
        start = content.index(b"PK\x01\x02")
        end = content.index(b"PK\x05\x06")
        entries = content[start:end] * 200
        closing = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 800, 800, len(entries), start, 0)
        path.write_bytes(content[:start] + entries + closing)

    def many(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as file:
            for number in range(200_000):
                file.writestr(f"{number}", b"")

    packed = {
        f"{name} of {member}": (lambda path, member=member, method=method: archive(
            path,
            pickle.dumps({"model": {}, "x": "a" * 10**7} if member == "pickle" else {"model": {}}, 2),
            bytes(3 * 10**7) if member == "data" else b"", method))
        for name, method in METHODS.items()
        for member in ("data", "pickle")
    }  # fmt: skip
    return {
        **packed, **{f"{share:.0%} of an archive": cut(share) for share in (0.05, 0.3, 0.6, 0.9, 0.99)},
        "overlapping members": overlapping, "200,000 members": many,
        "a pickle of 20 MB": lambda path: archive(path, pickle.dumps({"model": "a" * 2 * 10**7}, 2)),
    }  # fmt: skip


def readers_of_pt() -> dict[str, Callable[[Path, Callable[[Path], Any]], Callable[[], Any]]]:
    """How a user reads a .pt file: as the checkpoint of a run, as initial weights, as weights of open_clip's model."""

    def run(folder: Path, write: Callable[[Path], Any]) -> Callable[[], Any]:
        path = written_run(folder / "run")
        path.unlink()
        write(path)
        return lambda: clipzoo.load(path)

    def initial(folder: Path, write: Callable[[Path], Any]) -> Callable[[], Any]:
        write(folder / "weights.pt")
        return lambda: read_source(str(folder / "weights.pt"), "init.weights", None)

    def peer(folder: Path, write: Callable[[Path], Any]) -> Callable[[], Any]:
        write(folder / "weights.pt")
        return lambda: clipzoo.from_open_clip("ViT-B-32", str(folder / "weights.pt"))

    return {"a run": run, "init.weights": initial, "open_clip": peer}


def pt_cases() -> Iterator[tuple[str, Case]]:
    readers = readers_of_pt()
    for reader in ("a run", "init.weights"):
        for name in pickles(Path()):
            yield f"{reader}: {name}", (lambda folder, name=name, reader=reader: readers[reader](
                folder, lambda path: archive(path, pickles(folder)[name], bytes(64))))  # fmt: skip
        for name, write in {**special_files(), **damaged_archives()}.items():
            yield f"{reader}: {name}", lambda folder, write=write, reader=reader: readers[reader](folder, write)
    for name, write in damaged_archives().items():
        yield f"open_clip: {name}", lambda folder, write=write: readers["open_clip"](folder, write)


EXECUTING = ("open", "os.system", "eval", "exec", "Popen", "touch", "run_path", "os.mkdir")
FORMS: dict[str, Callable[[Any, Path], Any]] = {
    "an archive": lambda value, path: torch.save({"model": {"weight": value}}, path),
    "an old file": lambda value, path: torch.save({"model": value}, path, _use_new_zipfile_serialization=False),
    **{
        f"protocol {protocol}": lambda value, path, protocol=protocol: path.write_bytes(pickle.dumps(value, protocol))
        for protocol in (0, 2, 4, 5)
    },
}


def executing_cases() -> Iterator[tuple[str, Case]]:
    for reader, read in readers_of_pt().items():
        for name in EXECUTING:
            for form, write in FORMS.items():
                if reader == "a run" or form in ("an archive", "protocol 2"):
                    yield f"{reader}: {name} in {form}", (lambda folder, read=read, name=name, write=write: read(
                        folder, lambda path: write(executing(folder)[name], path)))  # fmt: skip


# Files in place of a .safetensors file.


def headers() -> dict[str, bytes]:
    def file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text) if length is None else length) + text + data

    def one(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
        return {"logit_scale": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}

    return {
        "header of 2^63 bytes": file(one(), bytes(16), 2**63), "header of 90 MB": file(one(), bytes(16), 9 * 10**7),
        "header beyond the file": file(one(), bytes(16), 10_000),
        "no header": struct.pack("<Q", 0), "seven bytes": bytes(7),
        "no JSON": file(b"{" * 100), "JSON 100,000 deep": file(b"[" * 100_000 + b"]" * 100_000),
        "a list": file([]), "not UTF-8": file(b'{"\xff": 1}'), "no tensors": file({}),
        "shape of 10^18": file(one(shape=(10**9, 10**9)), bytes(16)),
        "negative shape": file(one(shape=(-4,)), bytes(16)),
        "offsets beyond the file": file(one(shape=(10**9,), offsets=(0, HUGE)), bytes(16)),
        "offsets backwards": file(one(offsets=(16, 0)), bytes(16)),
        "offsets as text": file(one(offsets=("a", "b")), bytes(16)),
        "unknown type": file(one("OBJECT"), bytes(16)), "trailing bytes": file(one(), bytes(1000)),
        "overlap": file({**one(), "b": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, bytes(16)),
        "60,000 empty tensors": file(
            {f"{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(60_000)}),
        "header of 9 MB": file(b'{"__metadata__":{"a":"' + b"a" * 9 * 10**6 + b'"}}'),
        "a pickle": pickle.dumps({"model": 1}), "one of another model": file(one(), bytes(16)),
    }  # fmt: skip


def safetensors_cases() -> Iterator[tuple[str, Case]]:
    special = {name: write for name, write in special_files().items() if name != "no permission"}
    for reader in ("published", "transformers", "open_clip", "init.weights"):
        for name, write in {**dict.fromkeys(headers()), **special}.items():

            def case(folder: Path, reader: str = reader, name: str = name, write: Any = write) -> Callable[[], Any]:
                path, call = directory(folder, reader)
                path.unlink(missing_ok=True)
                path.write_bytes(headers()[name]) if write is None else write(path)
                return call

            yield f"{reader}: {name}", case


def directory(folder: Path, reader: str) -> tuple[Path, Callable[[], Any]]:
    """Write a sound model directory, and return the path of its weights and the call that loads it."""
    model = folder / "model"
    if reader == "init.weights":
        path = folder / "weights.safetensors"
        return path, lambda: read_source(str(path), "init.weights", None)
    sound = folder.parent / f"sound_{reader}"
    if not sound.exists():
        written_run(folder / "source")
        clipzoo.export(clipzoo.load(folder / "source"), sound, to={"published": "hub"}.get(reader, reader))
    shutil.copytree(sound, model)
    weights = model / ("open_clip_model.safetensors" if reader == "open_clip" else "model.safetensors")
    loads: dict[str, Callable[[], Any]] = {
        "published": lambda: clipzoo.load(model), "transformers": lambda: clipzoo.from_transformers(model),
        "open_clip": lambda: clipzoo.from_open_clip(f"local-dir:{model}"),
    }  # fmt: skip
    return weights, loads[reader]


# Configurations.

SIZES = {
    "run": ("encoder.image_tower.width", "encoder.image_tower.layers", "encoder.image_tower.image_size",
            "encoder.text_tower.width", "encoder.text_tower.layers", "encoder.text_tower.vocabulary",
            "encoder.text_tower.context_length", "encoder.image_width", "head.embed_width", "head.text_width", "seed"),
    "transformers": ("text_config.hidden_size", "text_config.num_hidden_layers", "text_config.vocab_size",
                     "text_config.max_position_embeddings", "vision_config.hidden_size", "vision_config.image_size",
                     "vision_config.num_hidden_layers", "projection_dim"),
    "open_clip": ("model_cfg.embed_dim", "model_cfg.text_cfg.width", "model_cfg.text_cfg.layers",
                  "model_cfg.text_cfg.vocab_size", "model_cfg.text_cfg.context_length", "model_cfg.vision_cfg.width",
                  "model_cfg.vision_cfg.layers", "model_cfg.vision_cfg.image_size"),
    "published": ("encoder.image_tower.width", "encoder.text_tower.layers", "encoder.text_tower.vocabulary",
                  "encoder.text_tower.context_length", "head.embed_width"),
}  # fmt: skip
"""Numbers of configurations that the shapes of the weights determine, by kind of model directory."""
VALUES = (10**6, 10**9, 10**18, -1, "x", None, [], 1e30)
FILES = {"transformers": "config.json", "open_clip": "open_clip_config.json", "published": "clipzoo.json"}


def size_cases() -> Iterator[tuple[str, Case]]:
    for reader, keys in SIZES.items():
        for key in keys:
            for value in VALUES:

                def case(folder: Path, reader: str = reader, key: str = key, value: Any = value) -> Callable[[], Any]:
                    if reader == "run":
                        written_run(folder / "run", {key: value})
                        return lambda: clipzoo.load(folder / "run")
                    _, call = directory(folder, reader)
                    change_json(folder / "model" / FILES[reader], key, value)
                    return call

                yield f"{reader}: {key}={value}", case


def change_json(path: Path, key: str, value: Any) -> None:
    content = json.loads(path.read_text())
    node = content
    *names, last = key.split(".")
    for name in names:
        node = node[name]
    node[last] = value
    path.write_text(json.dumps(content))


TIMM_OPTIONS = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "scriptable",
                "features_only",
                "pretrained", "weight_init", "pretrained_strict", "kwargs_filter", "pruned")  # fmt: skip
KERNEL = {"_attn_implementation": "kernels-community/evil", "attn_implementation": "kernels-community/evil"}
CODE = {"auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoTokenizer": ["evil.Tokenizer", None]}}


def option_cases() -> Iterator[tuple[str, Case]]:
    """Options that a configuration hands to timm, transformers and open_clip."""

    def tower(folder: Path, options: dict[str, Any], name: str = "test_vit") -> Callable[[], Any]:
        node = {"_target_": "clipzoo.encoders.image.TimmTower", "name": name, "image_size": None, "pretrained": False,
                "options": options}  # fmt: skip
        written_run(folder / "run", {"encoder.image_tower": node})
        return lambda: clipzoo.load(folder / "run")

    for option in TIMM_OPTIONS:

        def case(folder: Path, option: str = option) -> Callable[[], Any]:
            torch.save({"state_dict": executing(folder)["open"]}, folder / "evil.pth")
            file = str(folder / "evil.pth")
            return tower(folder, {option: {"file": file} if "cfg" in option else file})

        def model(folder: Path, option: str = option) -> Callable[[], Any]:
            cfg = {"input_size": [3, 160, 160], "num_classes": 0}
            (folder / "config.json").write_text(json.dumps(
                {"architecture": "test_vit", "pretrained_cfg": cfg, "model_args": {option: "x"}}))  # fmt: skip
            return tower(folder, {}, f"local-dir:{folder}")

        yield f"timm: option {option}", case
        yield f"timm: model_args {option}", model
    for name, code in [*((name, CODE) for name in ("bert", "unknown", "clip")), ("bert", KERNEL)]:
        for what in ("configuration", "tokenizer", "open_clip"):

            def remote(
                folder: Path, name: str = name, what: str = what, code: dict[str, Any] = code
            ) -> Callable[[], Any]:
                place = folder / "remote"
                place.mkdir()
                (place / "evil.py").write_text(f"open({str(canary(folder))!r}, 'w')\nclass Config: pass\n")
                content = {"model_type": name, "hidden_size": 12, "num_hidden_layers": 1, **code}
                (place / "config.json").write_text(json.dumps(content))
                (place / "tokenizer_config.json").write_text(json.dumps(CODE))
                if what == "tokenizer":
                    return lambda: HuggingFaceTokenizer(str(place), 8)(["a"])
                if what == "configuration":
                    return lambda: HuggingFaceText(str(place), {"vocab_size": 8, "hidden_size": 12}, tokenizer="clip")
                _, call = directory(folder, "open_clip")
                change_json(folder / "model" / FILES["open_clip"], "model_cfg.text_cfg",
                            {"hf_model_name": str(place), "hf_tokenizer_name": str(place)})  # fmt: skip
                return call

            yield f"transformers: {next(iter(code))} of a {what} of type {name}", remote
    for option in ("_attn_implementation", "attn_implementation", "auto_map", "trust_remote_code",
                   "quantization_config",
                   "_name_or_path", "dtype", "use_kernels"):  # fmt: skip
        yield f"transformers: option {option}", lambda folder, option=option: lambda: HuggingFaceText(
            "bert", {option: "kernels-community/evil"}, tokenizer="clip")  # fmt: skip


FAMILIES: dict[str, Callable[[], Iterator[tuple[str, Case]]]] = {
    "files of torch.save": pt_cases, "files that execute": executing_cases, "safetensors": safetensors_cases,
    "sizes": size_cases, "options": option_cases,
}  # fmt: skip
