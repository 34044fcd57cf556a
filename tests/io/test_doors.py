"""The three doors to the disk: names are joined, files opened and files written in one place each.

The tests walk the syntax trees of the package. Each first finds a planted bypass.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from tests.support.sources import trees

CHECKED = ("below", "folder_name")
"""Functions of clipzoo.io that return a name, or the path of one, that leads nowhere else."""


COUNTED = ("rank", "step", "seed", "number", "fold", "shard")
"""Names of integers."""


class Words:
    """Which expressions of a module are paths: by annotations, and by what they are assigned or iterate over.

    Names count within their module; attributes and functions in the whole package.
    """

    def __init__(self, trees: dict[str, ast.Module]) -> None:
        self.members = {"parent", "Path", "absolute", "resolve", "with_suffix", "with_name", "expanduser", "root"}
        self.members |= {"cache", "output", "folder"}  # of command lines
        self.names: dict[str, set[str]] = {}
        for file, tree in trees.items():
            names = self.names[file] = {"Path"}
            for node in ast.walk(tree):
                match node:
                    case ast.arg(arg=name, annotation=annotation) if is_path(annotation):
                        names.add(name)
                    case (
                        ast.AnnAssign(target=ast.Name(id=name), annotation=annotation)
                        | ast.FunctionDef(name=name, returns=annotation)
                    ) if is_path(annotation):
                        names.add(name)
                        self.members.add(name)
        nodes = [(file, node) for file, tree in trees.items() for node in ast.walk(tree)]
        for file, node in 3 * nodes:  # names that are assigned from names
            match node:
                case ast.Assign(targets=[target], value=value):
                    pairs = [(target, value)]
                    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                        pairs = list(zip(target.elts, value.elts, strict=False))
                    for left, right in pairs:
                        if self.is_path(file, right):
                            self.names[file].add(ast.unparse(left))
                            self.members.update([left.attr] if isinstance(left, ast.Attribute) else [])
                case (
                    ast.For(target=ast.Name(id=name), iter=source)
                    | ast.comprehension(target=ast.Name(id=name), iter=source)
                ) if any(word in ast.unparse(source) for word in ("glob(", "iterdir(")):
                    self.names[file].add(name)

    def is_path(self, file: str, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
                return name in self.names[file] or (name in self.members and isinstance(node, ast.Call))
            case ast.Attribute(attr=name) | ast.Call(func=ast.Attribute(attr=name)):
                return name in self.members
            case ast.BinOp(left=left, op=ast.Div()):
                return self.is_path(file, left)
            case ast.IfExp(body=body, orelse=other) | ast.BoolOp(values=[body, other]):
                return self.is_path(file, body) or self.is_path(file, other)
        return False

    def is_own(self, file: str, node: ast.expr, loops: set[str]) -> bool:
        """True for a name that the code writes: text, constants, numbers, digests, and a path's own last part."""
        match node:
            case ast.Constant():
                return True
            case ast.Name(id=name):
                return name.isupper() or name in loops or name in COUNTED or "digest" in name
            case ast.Attribute(value=value, attr=name):
                last_part = name in ("name", "stem", "suffix") and self.is_path(file, value)
                return name.isupper() or last_part or name in COUNTED or "digest" in name or name == "nodename"
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                return name in (*CHECKED, "getpid", "getuid", "hexdigest") or "digest" in name
            case ast.Subscript(value=value):
                return self.is_own(file, value, loops)
            case ast.JoinedStr(values=values):
                return all(
                    self.is_own(file, value.value, loops) or ast.unparse(value.format_spec or value)[-2] in "dg"
                    for value in values
                    if isinstance(value, ast.FormattedValue)
                )
            case ast.IfExp(body=body, orelse=other):
                return self.is_own(file, body, loops) and self.is_own(file, other, loops)
        return False


@cache
def words_of_package() -> Words:
    return Words(trees())


def is_path(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation).removeprefix("str | ").split(" | ")[0] == "Path"


def loops_over_constants(tree: ast.Module) -> set[str]:
    """Names that iterate over constants of the code, or over numbers."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case (
                ast.For(target=ast.Name(id=name), iter=source)
                | ast.comprehension(target=ast.Name(id=name), iter=source)
            ):
                literal = isinstance(source, ast.Tuple) and all(isinstance(one, ast.Constant) for one in source.elts)
                if literal or (isinstance(source, ast.Name) and source.id.isupper()):
                    found.add(name)
    return found


def joins(trees: dict[str, ast.Module], words: Words) -> Iterator[tuple[str, str]]:
    """Yield file and expression of every path that is joined with a name from elsewhere."""
    for file, tree in trees.items():
        loops = loops_over_constants(tree)
        for node in ast.walk(tree):
            names: list[ast.expr] = []
            match node:
                case ast.BinOp(left=left, op=ast.Div(), right=right) if words.is_path(file, left):
                    is_number = isinstance(right, ast.Constant) and not isinstance(right.value, str)
                    names = [] if is_number or isinstance(right, ast.BinOp) else [right]
                case ast.Call(func=ast.Attribute(attr="joinpath" | "with_name"), args=names):
                    pass
                case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="path"), attr="join"), args=[_, *names]):
                    pass
                case ast.Call(
                    func=ast.Name(id="Path"), args=[ast.JoinedStr(values=[_, ast.Constant(value=text), *names])]
                ):
                    names = [value.value for value in names if "/" in text and isinstance(value, ast.FormattedValue)]
                case ast.Call(func=ast.Name(id="Path"), args=[_, *names]):
                    pass
            if not all(words.is_own(file, name, loops) for name in names):
                yield file, ast.unparse(node)


TABLES = "a table of the user's own names images anywhere on the disk; they are read only as images"
DIGEST = "a digest that the code has computed"
LABEL = "the name of a sample in messages and left_out.tsv, which is never opened"
OPTIONS = "options of the command line, in folders of configurations"
INSTALLED = "files of an installed package, named by the catalogue"
RECIPES = "names that clipzoo's recipes and studies write in the code"
TRUSTED = {
    ("cli/launch.py", "Path('slurm') / f'{script}.sbatch'"): "one of the names of batch scripts",
    ("cli/launch.py", "SLURM / f'{script}.sbatch'"): "one of the names of batch scripts",
    ("config/schema.py", "PACKAGE.joinpath(*module.split('.')[1:])"): "modules of clipzoo",
    ("config/groups.py", "folder / group / f'{option}.yaml'"): OPTIONS,
    ("config/groups.py", "folder / group"): OPTIONS,
    ("config/groups.py", "folder / name"): OPTIONS,
    ("config/groups.py", "folder / path"): OPTIONS,
    ("cli/data.py", "partial / shard_folder.relative_to(options.output)"): "no name, or held_out",
    ("data/index.py", "folder / f'{name}-{content.hexdigest()[:12]}.bin'"): DIGEST,
    ("data/index.py", "folder / f'{name}.json'"): DIGEST,
    ("data/tables/selection.py", "open_folder(folders, index.locations[0]) / files[0].name"): DIGEST,
    ("data/write.py", "Path(self.index.shards[shard].name, self.index.keys(shard)[position])"): LABEL,
    ("data/write.py", "table.parent / image"): TABLES,
    ("evaluation/datasets/own.py", "table.parent / row[image]"): TABLES,
    ("evaluation/datasets/prompts.py", "resources.files('clip_benchmark').joinpath('datasets', file)"): INSTALLED,
    ("io/files.py", "root / record"): RECIPES,
    ("io/files.py", "folder / record"): RECIPES,
    ("io/files.py", "path / part"): "the one join of clipzoo.io.below",
    ("runs/store.py", "Path(place, name)"): "a file that os.walk found",
    ("report/pages.py", "swept[0].folder.parent / sweep_name(overrides)"): "a digest of the command line",
    ("training/checkpoint_files.py", "folder / file"): RECIPES,
    ("training/tuned.py", "self._folder / f'{self._view}.{name}'"): RECIPES,
    ("lab/worlds/emoji.py", "folder / f'{train}.csv'"): RECIPES,
    ("lab/worlds/emoji.py", "folder / f'{judge}.csv'"): RECIPES,
    ("lab/worlds/emoji.py", "downstream / dataset"): RECIPES,
    ("lab/worlds/packages.py", "folder / package.file"): RECIPES,
    ("report/published.py", "folder / file"): RECIPES,
    ("lab/studies/run.py", "folder / name"): RECIPES,
    ("lab/studies/run.py", "folder / f'{name}.csv'"): RECIPES,
    ("lab/studies/run.py", "folder / f'{name}.png'"): RECIPES,
}
"""Joins with a name that no stranger chooses, and who chooses it."""
BYPASSES = {
    "a name of a store": "def fetch(store: Store, folder: Path):\n    [folder / name for name in store.names()]",
    "a value of JSON": "def read(path: Path):\n    return path.parent / json.loads(path.read_text())['file']",
    "a name beside a file": "def read(path: Path, table: dict):\n    return path.with_name(table['data'])",
    "a name in a longer one": "def read(root: Path, key: Key):\n    return root / 'evaluation' / f'{key.dataset}.npz'",
    "a member of an archive": "def unpack(root: Path, archive: TarFile):\n    [root.joinpath(m.name) for m in archive]",
    "two arguments of Path": "def read(root: str, entry: dict):\n    return Path(root, entry['name'])",
    "os.path": "def read(root: str, name: str):\n    return os.path.join(root, name)",
    "an attribute": "class Mirror:\n    folder: Path\n    def send(self, name):\n        return self.folder / name",
    "a path by another name": "def read(run: Path, name):\n    place = run / 'report'\n    return place / name",
    "text with a slash": "def read(folder: Path, name):\n    return Path(f'{folder}/{name}')",
}


def test_every_name_that_the_code_does_not_write_is_joined_by_the_one_function():
    found = set(joins(trees(), words_of_package()))
    assert found - TRUSTED.keys() == set(), "join these with clipzoo.io.below"
    assert TRUSTED.keys() - found == set(), "these are joined no longer"


@pytest.mark.parametrize("bypass", BYPASSES)
def test_a_join_that_bypasses_the_function_is_found(bypass):
    trees = {"planted.py": ast.parse(BYPASSES[bypass])}
    assert len(list(joins(trees, Words(trees)))) == 1


SOURCES = {
    "open", "read_text", "read_bytes", "load", "safe_open", "load_file", "memmap", "from_file", "fromfile", "read_csv",
    "ZipFile", "safe_load",
}  # fmt: skip
TARGETS = {
    "write_text", "write_bytes", "replace", "rename", "link", "symlink", "copy", "copy2", "copyfile", "copytree",
    "move", "save", "savez", "savez_compressed", "save_file", "savefig", "to_csv", "mkstemp", "ShardWriter",
    "TarWriter", "export_chrome_trace", "touch",
}  # fmt: skip
MODULES = {
    "os", "shutil", "np", "numpy", "torch", "Image", "tarfile", "zipfile", "json", "yaml", "pd", "gzip", "safetensors",
    "OmegaConf",
}  # fmt: skip


def opened(trees: dict[str, ast.Module], words: Words) -> Iterator[tuple[str, str, bool]]:
    """Yield file, call and True for writing, of every call that opens a file by its path."""
    for file, tree in trees.items():
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name, owner = getattr(node.func, "attr", getattr(node.func, "id", "")), getattr(node.func, "value", None)
            if name != "open" and name not in SOURCES | TARGETS:
                continue
            of_path = owner is not None and words.is_path(file, owner)
            of_library = isinstance(owner, ast.Name) and owner.id in MODULES
            takes_path = any(words.is_path(file, one) or "str(" in ast.unparse(one) for one in node.args[:2])
            openers = ("open", "safe_open", "load_file", "save_file", "ShardWriter", "TarWriter")
            direct = owner is None and name in openers
            by_library = of_library and (takes_path or name in ("open", "copyfile", "mkstemp"))
            saves = takes_path and name in ("save", "export_chrome_trace", "savefig")
            if not (of_path or direct or by_library or saves):
                continue
            text = ast.unparse(node)
            if name == "open":
                modes = [*node.args[not of_path :], *(item.value for item in node.keywords if item.arg == "mode")]
                shown = " ".join(map(ast.unparse, modes))
                yield file, text, any(one in shown for one in ("'w", "'a", "'x", "+", "O_CREAT", "O_WRONLY", "O_RDWR"))
            else:
                yield file, text, name in TARGETS


OWN = "a file of the package, of an installed one, or of the system"
CACHE = "a cache: a copy counts by its size or by a key that is written whole and last"
UNPUBLISHED = "in a folder without its name, which clipzoo.io.new_folder or ensure_folder publishes"
WEIGHTS = "weights, by a library that maps the file; opened by clipzoo.io.readable before"
LOCK = "a lock has no content that counts"
IN_WHOLE = "into a file that clipzoo.io.whole has opened"
READERS = {
    "config/groups.py": OWN,
    "evaluation/datasets/dataset.py": OWN,
    "ops/tiles.py": OWN,
    "__init__.py": OWN,
    "training/checkpoint_files.py": WEIGHTS,
    "cli/launch.py": OWN,
    "config/listing.py": OWN,
    "data/loader.py": OWN,
    "distributed/launch.py": OWN,
    "data/images.py": "bytes in memory",
    "report/frame.py": OWN,
    "data/locations.py": "without waiting; the size is compared",
    "data/index.py": "verified when it was loaded, or just written",
    "data/tables/selection.py": "weights that it has written; their number is compared",
    "training/tuned.py": CACHE,
    "training/profile.py": "the trace that it has just written",
    "training/loggers.py": "pictures that the report has just written",
    "io/files.py": "the one reader",
    "io/weights.py": WEIGHTS,
    "lab/reproduce.py": "its own log",
    "report/published.py": OWN,
    "lab/worlds/packages.py": "packages with a known digest",
    "lab/worlds/hands.py": "bytes in memory, or pictures that it has just written",
    "lab/studies/run.py": "bytes in memory",
}  # fmt: skip
"""Modules that open files by other means than clipzoo.io, and why they may."""
WRITERS = {
    "io/files.py": "the one writer",
    "evaluation/datasets/prompts.py": IN_WHOLE,
    "evaluation/datasets/tar.py": UNPUBLISHED,
    "evaluation/task.py": "reserves space in a file that is removed",
    "exports/graphs.py": UNPUBLISHED,
    "initial.py": "links of checkpoints, the mark last",
    "runs/lock.py": LOCK,
    "evaluation/datasets/benchmarks.py": LOCK,
    "data/locations.py": CACHE,
    "data/reader.py": CACHE,
    "distributed/launch.py": "the null device",
    "cli/doctor.py": "the null device",
    "distributed/watchdog.py": "stacks and collectives of a process that is about to end",
    "data/write.py": IN_WHOLE,
    "runs/store.py": "copies that are removed after their upload",
    "training/profile.py": "torch's own trace; the summary of it is written whole",
    "lab/reproduce.py": "the log of a process",
    "lab/methods/lab.py": IN_WHOLE,
    "lab/worlds/world.py": UNPUBLISHED,
    "lab/worlds/emoji.py": UNPUBLISHED,
    "lab/worlds/hands.py": UNPUBLISHED,
    "runs/search.py": "cuts off the line that a kill has left",
}  # fmt: skip
"""Modules that write files by other means than clipzoo.io, and why they may."""
PLANTED = {
    "def read(path: Path):\n    return path.read_text()": False,
    "def read(path: Path):\n    return open(path).read()": False,
    "def read(run: Path):\n    report = run / 'report'\n    return report.read_bytes()": False,
    "def read(path: Path):\n    return np.load(path)": False,
    "def read(path: Path):\n    return Image.open(path)": False,
    "def read(path: Path):\n    return torch.load(str(path))": False,
    "def read(path: Path):\n    return OmegaConf.load(path)": False,
    "def write(path: Path):\n    path.write_text('')": True,
    "def write(path: Path):\n    with path.open('wb') as file: pass": True,
    "def write(path: Path):\n    open(path, mode='a')": True,
    "def write(path: Path):\n    os.replace(path, path)": True,
    "def write(path: Path):\n    torch.save({}, path)": True,
    "def write(path: Path, image):\n    image.save(path)": True,
    "def write(path: Path):\n    shutil.copy(path, path)": True,
    "def write(path: Path):\n    return TarWriter(str(path))": True,
}


@pytest.mark.parametrize(("writes", "trusted"), [(False, READERS), (True, WRITERS)], ids=["readers", "writers"])
def test_files_are_opened_and_written_by_clipzoo_io(writes, trusted):
    found = {file for file, _, writing in opened(trees(), words_of_package()) if writing == writes}
    assert found - trusted.keys() == set(), "use the readers and writers of clipzoo.io"
    assert trusted.keys() - found == set(), "these do so no longer"


@pytest.mark.parametrize("code", PLANTED)
def test_a_planted_reader_or_writer_is_found(code):
    trees = {"planted.py": ast.parse(code)}
    assert [writes for _, _, writes in opened(trees, Words(trees))] == [PLANTED[code]]
