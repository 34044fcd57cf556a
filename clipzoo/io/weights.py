"""Weights named in a configuration: find their file, compute its digest, and read its tensors within size limits.

Also access to the libraries and the hub that publish weights. Only `read_tensors` needs torch.
"""

from __future__ import annotations

import io
import os
import pickletools
import re
import socket
import sys
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from clipzoo.errors import ConfigError, cause, one_message
from clipzoo.io.files import ANY_SIZE, MB, DamagedFileError, DamageLog, digest_of, read_json, readable, shortened

_NAMES_CLASSES = ("GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4")
"""Opcodes of pickles that name a class or a function."""
REGISTRIES = ("open_clip", "transformers", "timm", "huggingface")
RANDOM = "random"
"""Name of the random initial weights, which the seed determines."""
CONNECT_SECONDS = 5.0
"""Longest wait for a connection to the hub."""
MANIFEST = "manifest.json"
"""File of a sharded checkpoint's folder that lists the others."""
MOST_DESCRIPTION = 2**23
"""Largest number of bytes that describe tensors, apart from their values: enough for about 50,000 tensors."""
_NAME = re.compile(r"step_(\d+)(\.pt)?")
_STORED_CLASSES = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor|tensor_v2|parameter)"
    r"|torch(\.storage)? ([A-Z][A-Za-z0-9]*Storage|Size|device|bool|[a-z]+\d+\w*)"
)
"""Names that torch.save writes for tensors in a .pt file. None allocates memory of a size given in the file."""
FORMS_ON_DISK = "a run directory, one of its checkpoints or a .safetensors file"
FORMS = f"{FORMS_ON_DISK}, open_clip:NAME/TAG, transformers:NAME, timm or huggingface"


def registry_of(name: str) -> str | None:
    """Return the registry that has the weights: "timm" for "timm" and "timm:NAME"; None for weights on the disk."""
    registry = name.partition(":")[0]
    return registry if registry in REGISTRIES else None


def weights_file(name: str, key: str, forms: str = FORMS) -> Path:
    """Return the file of weights on the disk: a run's newest complete checkpoint, or an export's .safetensors.

    A sharded checkpoint is a folder. key, forms: configuration key and its values, for messages. Raises ConfigError.
    """
    path = Path(name)
    if path.is_file() or is_sharded(path):
        return path
    if "://" in name:
        raise ConfigError(f"{key}={name} is in a store, but weights are read from the disk: give {key} a local copy")
    if not path.exists():
        raise ConfigError(f"{key}={name} does not exist: give {forms}")
    if (path / "config.yaml").exists():
        checkpoints = [place for place in checkpoints_in(path / "checkpoints") if mark_of(place).exists()]
        if not checkpoints:
            raise ConfigError(f"{key}={name} is a run without a checkpoint: train it first")
        return checkpoints[-1]
    files = sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise ConfigError(f"{key}={name} is neither a run nor a folder with one .safetensors file (it has {names})")
    return files[0]


def weights_digest(name: str, key: str, forms: str = FORMS) -> str:
    """Return the SHA-256 of weights on the disk, or the name of weights of a registry. Raises ConfigError."""
    location = name
    if registry := registry_of(name):
        # These refer to the disk: open_clip:local-dir:FOLDER, open_clip:NAME/FILE and FOLDER of transformers.
        reference = name.partition(":")[2]
        location = reference.partition("/")[2] if registry == "open_clip" else reference
        if reference.startswith("local-dir:"):
            location = reference.removeprefix("local-dir:")
        elif not location or not Path(location).exists():
            return name
    if name == RANDOM:
        return name
    path = weights_file(location, key, forms)
    # The .json next to another program's file is not a mark.
    if mark_of(path).exists() and is_checkpoint(path) and (run_of(path) / "config.yaml").exists():
        content = read_json(mark_of(path), MB, "give another checkpoint", fields={"sha256": str})
        return content["sha256"]
    return digest_of(path / MANIFEST if is_sharded(path) else path)


def mark_of(checkpoint: Path) -> Path:
    """Return the .json file that marks a checkpoint as complete."""
    return checkpoint.with_suffix(".json")


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, in files or sharded, complete or not, from the oldest to the newest."""
    return sorted((path for path in folder.glob("step_*") if _NAME.fullmatch(path.name)), key=step_of)


def recorded(folder: Path, name: str, *types: type) -> Any:
    """Return a fact of these types in the newest mark that has it, or None. Damaged marks are named in the log."""
    damage = DamageLog()
    paths = sorted(folder.glob("step_*.json"), reverse=True)
    marks: list[dict[str, Any]] = [damage.read(partial(read_json, path, MB), {}) for path in paths]
    return next((mark[name] for mark in marks if isinstance(mark.get(name), types)), None)


def is_checkpoint(path: Path) -> bool:
    """Return True for a checkpoint: its file or folder, or a missing path with a checkpoint's name; False for a run."""
    if path.is_dir():
        return is_sharded(path)
    return _NAME.fullmatch(path.name) is not None or (path.suffix == ".pt" and path.is_file())


def is_of_other_program(path: Path) -> bool:
    """Return True for a .pt file, which may be missing, without the name of a run's checkpoint, such as epoch_5.pt."""
    return path.suffix == ".pt" and not path.is_dir() and _NAME.fullmatch(path.name) is None


def is_sharded(path: Path) -> bool:
    """Return True for the folder of a sharded checkpoint; False for a checkpoint in one file, and for a run."""
    return path.is_dir() and _NAME.fullmatch(path.name) is not None and not (path / "config.yaml").exists()


def step_of(checkpoint: Path) -> int:
    """Return the number of steps after which a checkpoint was saved. Raises ConfigError for another path."""
    name = _NAME.fullmatch(checkpoint.name)
    if name is None:
        raise ConfigError(f"{checkpoint} does not have the name of a run's checkpoint: give RUN/checkpoints/step_*.pt")
    return int(name[1])


def run_of(path: Path) -> Path:
    """Return the run directory of a checkpoint <run>/checkpoints/step_*, or `path` itself."""
    return path.parent.parent if is_checkpoint(path) else path


def read_tensors(path: Path, remedy: str = "", mapped: bool = False) -> dict[str, Any]:
    """Return the content of a .safetensors file, or of any other file as torch.save writes it. Nothing is executed.

    All tensors are read here, after `require_bounded`. mapped: read the values of a .pt file when they are used,
    as those of a .safetensors file are. Raises DamagedFileError if the file is missing, needs more memory than its
    size, is not a file of tensors, or holds objects other than tensors and plain values.
    """
    import torch

    require_bounded(path, remedy)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    # torch and safetensors report a file of another kind as UnpicklingError, RuntimeError, EOFError, AssertionError ...
    except Exception as error:
        kind = "safetensors file" if path.suffix == ".safetensors" else "checkpoint of weights and plain values"
        raise DamagedFileError(path, f"is not a {kind} ({cause(error)})", remedy) from error
    if not isinstance(content, dict):
        raise DamagedFileError(path, "holds no mapping", remedy)
    for tensor in tensors_in(content):
        # A copy of an expanded tensor, which repeats few stored values, could take any amount of memory.
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            fault = f"has a tensor of shape {shortened(list(tensor.shape))} with fewer values"
            raise DamagedFileError(path, fault, remedy)
    return content


def require_bounded(path: Path, remedy: str = "") -> None:
    """Raise DamagedFileError unless a file of tensors takes, when it is read, memory in proportion to its size.

    The header of a .safetensors file must fit into the file. Any other file must be a zip archive, as torch.save writes
    it, whose members are not compressed and do not overlap; its pickle may name only torch's storages and tensors, and
    repeat its values at most as often as it has bytes. Headers and pickles have at most MOST_DESCRIPTION bytes.
    """
    if path.exists() and not path.is_file():
        raise DamagedFileError(path, "is not a regular file", remedy)
    kind = "checkpoint of weights and plain values"
    with readable(path, ANY_SIZE, remedy) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            if path.suffix == ".safetensors":
                header = int.from_bytes(file.read(8), "little")
                fault = f"is not a safetensors file (a header of {header:,} bytes in a file of {size:,})"
                _require(8 + header <= size, fault)
                _require(header <= MOST_DESCRIPTION, f"has a header of {header:,} bytes, at most {MOST_DESCRIPTION:,}")
                return
            _require(zipfile.is_zipfile(file), f"is not a {kind} (no zip archive of torch.save)")
            archive = zipfile.ZipFile(_Directory(file.raw))
            members = archive.infolist()
            packed = next((member for member in members if member.compress_type or member.flag_bits & 1), None)
            name = packed and shortened(packed.filename)
            _require(packed is None, f"has compressed members ({name}): torch.save writes none")
            total = sum(member.file_size for member in members)
            _require(total <= size, f"has members of {total:,} bytes in a file of {size:,}")
            for member in members:
                if member.filename.rpartition("/")[2] == "data.pkl":
                    _require(member.file_size <= MOST_DESCRIPTION, f"has a pickle of {member.file_size:,} bytes")
                    _require_plain(archive.read(member))
        except _BoundError as error:
            raise DamagedFileError(path, str(error), remedy) from None
        except Exception as error:  # zipfile and pickletools report a malformed file in many ways.
            raise DamagedFileError(path, f"is not a {kind} ({cause(error)})", remedy) from None


class _BoundError(Exception):
    """Fault of a file: a clause that follows its path."""


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise _BoundError(fault)


class _Directory(io.BufferedReader):
    """A file whose list of members zipfile can read only up to a size limit."""

    def read(self, count: int | None = -1) -> bytes:
        count = -1 if count is None else count
        _require(count <= MOST_DESCRIPTION, f"has a list of members of {count:,} bytes")
        return super().read(count if count >= 0 else MOST_DESCRIPTION)


def _require_plain(pickled: bytes) -> None:
    """Raise _BoundError if a pickle names other classes than torch.save does, or repeats its values too often."""
    # The number of values that each item represents, with all references written out; None for a mark.
    stack: list[list[int] | None] = []
    memo: dict[Any, list[int] | None] = {}
    copied = 0
    for opcode, argument, _ in pickletools.genops(pickled):
        name = opcode.name
        if name == "MARK":
            stack.append(None)
        elif name.endswith("GET"):
            stack.append(memo[argument])
        elif name.endswith("PUT"):
            memo[argument] = stack[-1]
        else:
            if name in _NAMES_CLASSES and not _STORED_CLASSES.fullmatch(str(argument)):
                raise _BoundError(f"is not a checkpoint of weights and plain values (it names {shortened(argument)})")
            operands: list[list[int]] = []
            for kind in opcode.stack_before[::-1]:
                if kind is pickletools.stackslice:
                    while (item := stack.pop()) is not None:
                        operands.append(item)
                elif kind is not pickletools.markobject:
                    operands.append(stack.pop())  # type: ignore[arg-type]
            count = sum(item[0] for item in operands)
            copied += count if name in ("REDUCE", "BUILD", "NEWOBJ") else 0
            # Items that others refer to grow with their content.
            changes = name in ("SETITEM", "SETITEMS", "APPEND", "APPENDS", "ADDITEMS", "BUILD")
            value = operands[-1] if changes else [1]
            value[0] = count if changes else 1 + count
            _require(copied + value[0] <= len(pickled) + 1000, "repeats the values of its pickle too often")
            stack.extend([value] * len(opcode.stack_after))


def tensors_in(content: object) -> list[Any]:
    """Return the tensors in nested mappings, lists and tuples."""
    import torch

    # A loop, because a file may nest its values deeper than Python's stack, or hold a list in itself.
    tensors: list[Any] = []
    pending, visited = [content], {id(content)}
    for value in pending:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, dict | list | tuple):
            inner = [part for part in (value.values() if isinstance(value, dict) else value) if id(part) not in visited]
            visited.update(map(id, inner))
            pending += inner
    return tensors


@contextmanager
def from_hub(name: str, what: str, remedy: str = "") -> Iterator[None]:
    """Like `one_message`, for a block that reads `name` from the hub, unless there is a file or folder of this name.

    Where the hub accepts no connection, only its cache is read: the libraries would retry silently for about a minute.
    """
    from huggingface_hub import constants

    was_offline = constants.HF_HUB_OFFLINE
    fault = None if was_offline or Path(name).exists() else unreachable(constants.ENDPOINT)
    if fault:
        what = f"{what} ({constants.ENDPOINT} cannot be reached: {fault}; nor is it in the cache)"
    constants.HF_HUB_OFFLINE = was_offline or fault is not None
    try:
        with one_message(what, remedy):
            yield
    finally:
        constants.HF_HUB_OFFLINE = was_offline


def unreachable(address: str) -> str | None:
    """Return why the host of an address accepts no connection; None if it does, or if there is a proxy."""
    url = urllib.parse.urlsplit(address)
    if url.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(url.hostname or ""):
        return None
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
        socket.create_connection((url.hostname or "", port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or os.strerror(error.errno) if error.errno else str(error)
    return None


class DeferredPackage(ModuleType):
    """A package whose `__init__` runs when a name is read that the package does not have yet."""

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        assert spec is not None and spec.loader is not None
        # From here on an ordinary module: its `__init__` may read its own names.
        self.__class__ = ModuleType  # type: ignore[assignment]
        try:
            spec.loader.exec_module(self)
        except BaseException:
            self.__class__ = DeferredPackage  # type: ignore[assignment]
            raise
        return getattr(self, name)


def import_alone(name: str) -> Any:
    """Import PACKAGE.MODULE without the package's `__init__`, which runs when a name of the package is first read."""
    package = name.partition(".")[0]
    if package not in sys.modules:
        spec = find_spec(package)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        deferred = module_from_spec(spec)
        deferred.__class__ = DeferredPackage
        sys.modules[package] = deferred
    return import_module(name)
