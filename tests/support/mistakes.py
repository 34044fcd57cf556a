"""A grammar of wrong command lines: every key of every group, every option of every command and script."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import runpy
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from clipzoo.cli.__main__ import OVERRIDE_COMMANDS, _parser
from clipzoo.cli.arguments import output_folder
from clipzoo.config.compose import compose
from clipzoo.config.groups import groups, options
from clipzoo.runs.identity import flat
from tests.support.paths import ROOT
from tests.support.shards import picture

SECONDS = 120
"""Longest run of one command line."""
HEADS = {
    "infonce": ("clip", "wpse", "kme", "cloob", "inner_product", "distance"), "infoloob": ("cloob",),
    "siglip": ("clip",), "dcl": ("cosine",), "cyclip": ("cosine",), "nuclr": ("cosine",), "sogclr": ("cosine",),
    "isogclr": ("cosine",), "conditional": ("inner_product",), "joint": ("distance",),
    "mmd_conditional": ("clip",), "mmd_joint": ("clip",),
}  # fmt: skip
"""Heads that each objective can train."""
SIGNED = ("zeta", "xi", "initial_bias")
"""Last parts of the keys whose numbers may be negative."""


@dataclass(frozen=True)
class Line:
    """A command line. is_wrong: it must be refused; otherwise it may also be carried out."""

    script: str
    arguments: tuple[str, ...]
    is_wrong: bool


@dataclass(frozen=True)
class Outcome:
    """code: exit code, None after the time limit. output, errors: of the process."""

    code: int | None
    output: str
    errors: str


def lines(count: int, seed: int, files: Mapping[str, Path]) -> list[Line]:
    """Draw `count` command lines. files: see `write_files`."""
    draw = random.Random(seed)
    kinds = (_train, _wrong_train, _structure, _launch, _evaluate, _study, _program, _file)
    weights = (15, 10, 10, 5, 8, 4, 43, 5)
    # A folder of its own for each line: a line must not find its run finished by another one.
    folders = [
        {**files, "runs": files["runs"].with_name(f"runs_{number}"), "made": files["made"].with_name(f"made_{number}")}
        for number in range(count)
    ]
    return [draw.choices(kinds, weights)[0](draw, own) for own in folders]


def right_lines(files: Mapping[str, Path]) -> list[Line]:
    """The command lines without a mistake, one for each objective: all must be carried out."""
    draw = random.Random(0)
    return [Line("train.py", tuple(_short_training(draw, files, objective)), False) for objective in sorted(HEADS)]


def write_files(folder: Path, shards: str) -> dict[str, Path]:
    """Write the files that command lines name: tables of pairs, pictures, a dangling link, shards of a short training.

    Returns paths by name, also of the files that `preparations` make.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contents: dict[str, bytes] = {
        "ragged.csv": b"filepath,title\na.jpg\nb.jpg,b,c\n",
        "latin.csv": "filepath,title\na.jpg,caf\xe9\n".encode("latin-1"),
        "null.csv": b"filepath,title\na\0.jpg,b\n",
        "quote.tsv": b'filepath\ttitle\n"a.jpg\tb\n',
        "empty.csv": b"",
        "broken.json": b'{"images": [',
        "other.json": b'{"images": [{"file": 1}]}',
        "list.json": b"[1, 2]",
        "text": b"a text",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    for number in range(8):
        for path in (folder / "pictures" / ("red", "blue")[number % 2], folder / "captioned"):
            path.mkdir(parents=True, exist_ok=True)
            (path / f"{number}.png").write_bytes(picture(number))
            (path / f"{number}.txt").write_text(f"picture {number}")
    (folder / "dangling").symlink_to("nosuch")
    names = [*contents, "runs", "made", "run", "other", "index", "world", "pictures", "captioned", "dangling"]
    paths = {name: folder / name for name in names}
    return {**paths, "shards": Path(shards), "run": folder / "trained" / "run", "other": folder / "trained" / "other"}


def _train(draw: random.Random, files: Mapping[str, Path], script: str = "train.py") -> Line:
    """One wrong or unusual value of a key of a short training."""
    base = _short_training(draw, files)
    keys = _settings(tuple(base))
    key = draw.choice(sorted(set(keys) - {line.split("=")[0] for line in base} - {"encoder.image_size"}))
    text, is_wrong = _value(draw, key, keys[key])
    return Line(script, (*base, f"{key}={text}"), is_wrong)


def _wrong_train(draw: random.Random, files: Mapping[str, Path]) -> Line:
    """A value that is wrong for any key of any option of any group."""
    group = draw.choice([group for group in groups() if not group.startswith(("hydra", "study", "lab", "experiment/"))])
    option = draw.choice(options(group))
    base = [f"data.shards={files['shards']}", *_choice(group, option)]
    keys = _settings(tuple(base))
    own = [key for key in keys if key.startswith(group.replace("/", "."))] or list(keys)
    key = draw.choice(own)
    return Line("train.py", (*base, f"{key}={_always_wrong(draw, key)}"), True)


def _structure(draw: random.Random, files: Mapping[str, Path]) -> Line:
    """A mistake of the command line itself: keys, groups, options, sweeps, classes, brackets."""
    base = _short_training(draw, files)
    keys = sorted(key for key in _settings(tuple(base)) if "." in key)
    key, group = draw.choice(keys), draw.choice(["encoder", "head", "objective", "data", "optim", "trainer", "eval"])
    at = draw.randrange(len(key))
    mistakes: list[Sequence[str]] = [
        [f"{key[:at]}x{key[at:]}=1"], [f"+{key}_x=1"], [key], [f"{key}=["], [f"{key}={{"], [f"{key}='a"],
        [f"{key}=${{nosuch.key}}"], [f"{key}=${{{key}}}"], [f"~{key}_x"], [f"~{group}"], [f"{group}=nosuch"],
        [f"{group}=3"], [f"{group}=null"], [f"{group}=[]"], [f"{group}._target_=3"], [f"{group}._target_=nosuch"],
        [f"{group}._target_=clipzoo.nosuch.Class"], [f"{group}._target_=clipzoo.heads.vector.Nosuch"],
        [f"{group}._target_=null"], [f"~{group}._target_"], [f"{group}=a,b"], ["seed=1,2"], ["seed=choice(1,2)"],
        ["-m", "seed=range(3,1)"], ["-m", f"{key}=interval(0,1)"], ["-m", "--cfg", "job"], ["-m", f"{group}=nosuch,3"],
        ["--config-name", "eval"], ["--config-path", "x"], ["--config-dir", "x"], ["--nosuch"], ["--cfg", "nosuch"],
        ["--cfg"], ["--help", "x=1"], ["--info", "nosuch"], ["--resolve"], ["--package", "x"], ["=3"], [""],
        ["name=[1]"], ["row=nosuch"], ["seed=-1"], ["seed=1.5"], ["runs=null"], ["data.shards=3"],
        ["data.shards=null"], ["data.shards='{1..'"], ["data.shards='~nouser/x'"], ["data.shards=[]"],
        ["data.shards=[1]"], ["data.shards=[{path:x,weight:inf}]"], ["data.shards=[{path:x,weight:1e-9}]"],
        ["data.shards=[{weight:1}]"], ["data.shards=nosuch/{0..3}.tar"], ["trainer.steps=null"],
        ["trainer.epochs=1.0"], ["trainer.epochs=nosuch"], ["encoder.image_size=33"], ["data.image_size=48"],
        ["encoder.image_tower.heads=7"], ["encoder.text_tower.heads=7"], ["encoder.text_tower.vocabulary=5"],
        ["encoder.context_length=2"], ["encoder.text_tower.context_length=4"], ["head.image_width=5"],
        ["encoder.std=[-1,1,1]"], ["encoder.mean=[.5]"], ["optim.betas=[0.9]"], ["optim.betas=[0.9,1]"],
        ["optim.schedule.start=1"], ["optim.schedule.end=5"], ["optim.schedule.warmup_epochs=-1"],
        ["data.crop_scale=[0.9,0.5]"], ["data.rand_augment=[2,11]"],
        ["objective._target_=clipzoo.heads.wpse.GaussianKernel", "~objective", "+objective.width=1.0"],
        ["trainer.device=tpu"], ["trainer.timeout=abc"], ["eval.zero_shot=[nosuch]"], ["eval.workers=-1"],
    ]  # fmt: skip
    return Line("train.py", (*base, *draw.choice(mistakes)), True)


def _launch(draw: random.Random, files: Mapping[str, Path]) -> Line:
    if draw.random() < 0.5:
        line = _wrong_train(draw, files)
        return Line(COMMAND, ("launch", *line.arguments), True)
    base = (*_short_training(draw, files), "seed=0,1")
    wrong = (["--point", "5"], ["--point", "-1"], ["--point", "x"], ["--point"], ["--at-once", "-5"], ["--nosuch"],
             ["--submit", "--sbatch", "'x"], ["--point", "0", "--submit"], ["--table", "nosuch"],
             ["head=a,b"], ["name=x"], ["seed=range(3,1)"])  # fmt: skip
    return Line(COMMAND, ("launch", *base, *draw.choice(wrong)), True)


def _evaluate(draw: random.Random, files: Mapping[str, Path]) -> Line:
    option = draw.choice([[], ["eval=none"], ["eval=demo"]])
    key = draw.choice([key for key in _settings(tuple(option), "eval") if not key.startswith("encoder")])
    wrong = (["model=x", f"{key}={_always_wrong(draw, key)}"], [f"{key}x=1"], ["model=3"], ["run=[1]"], ["run=nosuch"],
             ["model=nosuch", "device=cpu"], ["model=a", "run=b"], [], ["model=ViT-B-32", "row=nosuch"],
             ["model=ViT-B-32", "device=tpu"], ["model=ViT-B-32", "timeout=abc"], ["--nosuch"],
             ["model=ViT-B-32", "eval.workers=-1"], ["run=/dev/null"], ["run=x/checkpoints/y.pt"], ["eval=nosuch"],
             ["model=a,b"])  # fmt: skip
    return Line(COMMAND, ("evaluate", *option, *draw.choice(wrong)), True)


def _study(draw: random.Random, files: Mapping[str, Path]) -> Line:
    study = draw.choice(options("study"))
    key = draw.choice(list(_settings((f"study={study}",), "studies")))
    wrong = ([f"study={study}", f"{key}={_always_wrong(draw, key)}"], ["study=nosuch"], ["jobs=0"], ["jobs=x"],
             ["studies=[nosuch]"], ["studies=3"], [f"study={study}", "folder=/dev/null/x"], ["--nosuch"],
             [f"study={study}", f"{key}x=1"])  # fmt: skip
    return Line(COMMAND, ("studies", *draw.choice(wrong)), True)


@dataclass(frozen=True)
class Program:
    """A command or script with a parser of its own. base: arguments without a mistake; {name}: a path of `files`.

    is_short: the base is carried out within seconds, on this machine.
    """

    script: str
    words: tuple[str, ...]
    parser: Any
    base: tuple[str, ...]
    is_short: bool = True

    def line(self, files: Mapping[str, Path], arguments: Sequence[str], is_wrong: bool) -> Line:
        return Line(self.script, (*self.words, *(argument.format_map(files) for argument in arguments)), is_wrong)


def _program(draw: random.Random, files: Mapping[str, Path]) -> Line:
    """A mistake in the arguments of a command or script that has a parser of its own."""
    is_command = draw.random() < 0.8
    program = draw.choice([program for program in _programs() if is_command == (program.script == COMMAND)])
    base, parser = program.base, program.parser
    options = [action for action in parser._actions if action.option_strings and action.dest not in ("help", "version")]
    with_value = [action for action in options if action.nargs != 0]
    wrong: list[tuple[str, ...]] = [(*base, "--nosuch"), (*base, "--nosuch=3"), (*base, "\udcff")]
    wrong += [(*base, _name(action)) for action in with_value if action.nargs != "*"]
    wrong += [(*base, f"{_name(action)}={text}") for action in with_value for text in _wrong_values(action, is_command)]
    # An option without the option that it belongs to.
    needed = {need.split()[0] for needs in getattr(parser, "_needs", {}).values() for need in needs}
    for action in getattr(parser, "_needs", {}):
        if not needed & {argument.split("=")[0] for argument in base}:
            wrong.append((*base, _name(action), *([] if action.nargs == 0 else [_right_value(action)])))
    for place, argument in enumerate(base):
        if place == 0 or (not argument.startswith("-") and not base[place - 1].startswith("--")):
            texts = ["", " ", "\udcff"]
            if argument.startswith("{"):
                texts += ["/dev/null/x", "x" * 300, "{dangling}/x", "{text}", "/dev/null"]
            wrong += [(*base[:place], text, *base[place + 1 :]) for text in texts]
    lists = [action for action in parser._actions if action.nargs == "+" and not action.option_strings]
    wrong += [(base[0], *base) for action in lists if base]
    return program.line(files, draw.choice(wrong), True)


def _wrong_values(action: argparse.Action, is_command: bool) -> list[str]:
    texts, huge = ["", " ", "\udcff"], ["1" + "0" * 18] * (is_command and "seed" not in action.dest)
    if action.choices:
        return [*texts, "nosuch"]
    if action.type in (Path, output_folder):
        folders = ["{text}", "/dev/null"] if action.type is output_folder else []
        return [*texts, "/dev/null/x", "x" * 300, "/" + "x/" * 2500, "{dangling}/x", *folders]
    if _is_number(action):
        return [*texts, "-5", "nan", "inf", "abc", "1e300", "1.5x", "1" + "0" * 400, *huge]
    return texts


def _is_number(action: argparse.Action) -> bool:
    try:
        return callable(action.type) and isinstance(action.type("1"), int | float)
    except argparse.ArgumentTypeError:
        return False


def _right_value(action: argparse.Action) -> str:
    return str(next(iter(action.choices))) if action.choices else "1"


def _name(action: argparse.Action) -> str:
    return action.option_strings[-1]


def _file(draw: random.Random, files: Mapping[str, Path]) -> Line:
    """A damaged or missing file among the arguments."""
    output = str(files["runs"].parent / "made")
    tables = [path for name, path in files.items() if "." in name]
    wrong = [["shards", "make", str(path), output] for path in tables]
    wrong += [["shards", "make", "/nosuch", output], ["shards", "make", str(tables[0])],
              ["shards", "make", str(tables[0].parent), str(tables[0])],
              ["shards", "index", "/nosuch/x.tar"], ["shards", "index", "/nosuch/{0..tar"],
              ["shards", "look", str(tables[0])], ["report", "/nosuch"], ["report"],
              ["report", str(files["runs"].parent), "--table", "nosuch"],
              ["datasets", "convert"], ["datasets", "convert", "nosuch", "--source", "/nosuch"],
              ["datasets", "convert", "food101", "--source", "/nosuch"],
              ["datasets", "make", str(tables[0]), output], ["datasets", "make", str(tables[0].parent)],
              ["datasets", "make", str(tables[0]), output, "--label", "nosuch"],
              ["world", "--root", str(tables[0]), "--train", "8"]]  # fmt: skip
    return Line(COMMAND, tuple(draw.choice(wrong)), True)


@cache
def _settings(base: tuple[str, ...], name: str = "train") -> Mapping[str, Any]:
    """All keys of a configuration with their values, without those of classes."""
    plain = compose(base, name, complete=False, nodes=ENCODER if name == "eval" else None)
    return {key: value for key, value in flat(plain).items() if not key.endswith("_target_")}


ENCODER = {
    "encoder": {
        "image_size": 224, "tokenizer": {"_target_": "clipzoo.data.tokenizer.ClipTokenizer", "context_length": 77}
    }
}  # fmt: skip


def _short_training(draw: random.Random, files: Mapping[str, Path], objective: str = "") -> list[str]:
    objective = objective or draw.choice(sorted(HEADS))
    return [
        "encoder=tiny", f"objective={objective}", f"head={draw.choice(HEADS[objective])}", "head.embed_width=8",
        f"data.shards={files['shards']}", "data.workers=0", "trainer.global_batch=8", "trainer.epochs=null",
        "trainer.steps=2", "trainer.precision=float32", "trainer.device=cpu", "optim.schedule.warmup_epochs=0.1",
        f"runs={files['runs']}",
    ]  # fmt: skip


def _choice(group: str, option: str) -> list[str]:
    """Overrides that choose an option of a group, with the group that holds it and the names that it needs."""
    towers = ["encoder.image.name=ViT-B-32", "encoder.text.name=ViT-B-32"]
    needed = {
        "head/kernel": ["head=wpse"], "encoder/image": ["encoder=towers", *towers],
        "encoder/text": ["encoder=towers", *towers], "encoder": ["encoder.name=ViT-B-32"] if option == "open_clip"
        else towers if option == "towers" else [],
        "average": ["encoder=tiny", *(["average.half_life_steps=10"] if option == "ema" else [])],
        "optim": ["encoder=tiny", *(["optim.name=adamw"] if option == "timm" else [])],
    }  # fmt: skip
    return [*needed.get(group, ["encoder=tiny"]), f"{group}={option}"]


def _value(draw: random.Random, key: str, default: Any) -> tuple[str, bool]:
    """Return an unusual value of a key, and whether it is wrong beyond doubt."""
    if draw.random() < 0.2:
        return _always_wrong(draw, key), True
    numbers = ["0", "-1", "1", "7", "33", "1000", "1e20", "0.3", "1.5", "1e-9", "1e-300", "1e300", "-1e300"]
    text = draw.choice([*numbers, "text", "null", "true", "false", "[]", "[1,2]", "''"])
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    if isinstance(default, bool):
        return text, text not in ("true", "false")
    wrong_numbers = {"1e300", "-1e300", "text", "true", "false", "[]", "[1,2]", "''"}
    return text, is_number and (text in wrong_numbers or (text == "-1" and not key.endswith(SIGNED)))


def _always_wrong(draw: random.Random, key: str) -> str:
    if key.endswith("options"):
        return draw.choice(["3", "text", "[1]", "null"])
    return draw.choice(["nan", "inf", "-inf", "[nan,1]", "[inf]", "{a:1}", "[{a:nan}]", "1" + "0" * 400, "${nosuch}"])


def preparations(files: Mapping[str, Path]) -> list[Line]:
    """The commands that make what other command lines read: runs, a dataset and an index. All must be carried out."""
    draw = random.Random(0)
    training = [line for line in _short_training(draw, files, "infonce") if not line.startswith(("head=", "runs="))]
    runs = [
        Line("train.py", (*training, f"head={head}", f"runs={files['run'].parent}", f"name={name}"), False)
        for head, name in (("clip", "run"), ("kme", "other"))
    ]
    small = ["--train", "16", "--probe", "16", "--test", "16", "--scenes", "8", "--processes", "1"]
    world = Line(COMMAND, ("world", "--root", str(files["world"]), *small), False)
    index = ("index", str(files["run"]), "--images", str(files["pictures"]), "--output", str(files["index"]))
    return [*runs, world, Line(COMMAND, index, False)]


def right_commands(files: Mapping[str, Path]) -> list[Line]:
    """The command lines of all commands without their mistakes: all must be carried out."""
    programs = [program for program in _programs() if program.is_short and program.script == COMMAND]
    return [
        program.line({**files, "made": files["made"] / str(number)}, program.base, False)
        for number, program in enumerate(programs)
    ]


COMMAND = "clipzoo/cli/__main__.py"
BASES = {
    "doctor": (), "ls": ("{run}",), "watch": ("{run}",),
    "report": ("{run}",), "config": ("head",), "compare": ("{run}", "{other}"),
    "lab": ("--report", "--output", "{made}"), "emoji": (), "hands": (),
    "explore": ("{run}", "--images", "{pictures}", "--static", "{made}", "--limit", "2"),
    "export": ("{run}", "--to", "hub", "--output", "{made}"),
    "index": ("{run}", "--images", "{pictures}", "--output", "{made}"),
    "features": ("{run}", "data.shards={shards}", "data.workers=0", "--output", "{made}", "--device", "cpu"),
    "search": ("a red picture", "--index", "{index}"),
    "shards make": ("{captioned}", "{made}", "--processes", "1"), "shards index": ("{shards}", "--on", "local:1"),
    "datasets list": (),
    "shards look": ("{shards}", "--on", "local:1", "--output", "{made}"),
    "shards balance": ("{shards}", "--top", "4", "--on", "local:1", "--output", "{made}"),
    "shards contamination": ("{shards}", "--root", "{world}/downstream", "--on", "local:1", "--output", "{made}"),
    "datasets convert": ("food101", "--source", "{captioned}", "--root", "{made}"),
    "datasets prompts": ("{world}/downstream/shapes", "{made}"),
    "datasets make": ("{pictures}", "{made}", "--processes", "1"),
    "world": ("--root", "{made}", "--train", "8", "--probe", "8", "--test", "8", "--scenes", "4", "--processes", "1"),
    "twin": ("{run}", "{run}", "--output", "{made}"),
    "migrate": ("clip_benchmark", "eval", "--dataset_root", "{world}/downstream"),
    "launch": ("head=clip", "data.shards={shards}", "seed=0,1"),
    "plan": ("encoder=tiny", "head=clip", "trainer.global_batch=64", "--gpus", "8"),
}  # fmt: skip
"""Arguments of each command without a mistake."""
LONG = ("lab", "emoji", "hands", "datasets convert", "doctor", "watch")
"""Commands whose base is not carried out: they train for hours, need files of others, or never end."""


@cache
def _programs() -> list[Program]:
    """Every command and script that has a parser of its own."""
    leaves = {name: parser for name, parser in _leaves(_parser()) if name not in OVERRIDE_COMMANDS}
    leaves |= {
        name: parser_of(import_module(f"clipzoo.{OVERRIDE_COMMANDS[name][0]}"), []) for name in ("launch", "plan")
    }
    programs = [
        Program(COMMAND, tuple(name.split()), parser, BASES[name], name not in LONG) for name, parser in leaves.items()
    ]
    benchmark = _module(ROOT / "scripts" / "benchmark.py")
    programs += [
        Program("scripts/benchmark.py", (name,), benchmark.subject_parser(name), (), is_short=False)
        for name in benchmark.SUBJECTS
    ]
    for path in sorted({*(ROOT / "scripts").glob("*.py")} - {ROOT / "scripts" / "benchmark.py"}):
        base = ("heads",) if path.stem == "demo_tables" else ()
        programs.append(Program(f"scripts/{path.name}", (), parser_of(_module(path)), base, is_short=False))
    return programs


def _leaves(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the parsers that have no subcommands, with their words."""
    commands = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not commands:
        yield name, parser
    for action in commands:
        for word, child in action.choices.items():
            yield from _leaves(child, f"{name} {word}".strip())


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    # Python puts the folder of a program before all others.
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def parser_of(module: Any, *arguments: Any) -> argparse.ArgumentParser:
    """The parser of `module.main`, as it stands when `main` parses its command line."""
    parsers: list[argparse.ArgumentParser] = []

    class Parsed(Exception):  # noqa: N818
        pass

    def parse(parser: argparse.ArgumentParser, *arguments: Any) -> None:
        parsers.append(parser)
        raise Parsed

    # Without a parser of this class, main() would do the whole work of the script.
    assert hasattr(module, "Parser"), f"{module} does not use clipzoo.cli.arguments.Parser"
    ways = ("parse_args", "parse_known_args", "parse_intermixed_args", "parse_known_intermixed_args")
    parser_class = module.Parser
    module.Parser = type("Parser", (parser_class,), dict.fromkeys(ways, parse))
    try:
        with contextlib.suppress(Parsed):
            module.main(*arguments)
    finally:
        module.Parser = parser_class
    (parser,) = parsers
    parser.__class__ = parser_class
    return parser


def run_all(commands: Sequence[Line], folder: str) -> None:
    """Run each command line in a fork of this process; write its outcome to `folder`/NUMBER.json."""
    os.chdir(ROOT)
    # The forks import nothing large, which would take most of their time.
    for name in ("torch", "clipzoo.cli.train", "clipzoo.cli.evaluate", "clipzoo.loading", "clipzoo.build"):
        import_module(name)
    for number, line in enumerate(commands):
        stem = Path(folder) / str(number)
        code = _waited(_forked(line, stem))
        texts = [stem.with_suffix(suffix).read_text(errors="replace") for suffix in (".out", ".err")]
        stem.with_suffix(".json").write_text(json.dumps([code, *texts]))


def outcomes(folder: Path, count: int) -> Iterator[Outcome]:
    for number in range(count):
        yield Outcome(*json.loads((folder / f"{number}.json").read_text()))


def fault(line: Line, outcome: Outcome) -> str | None:
    """Return what is wrong with the outcome of a command line; None if nothing is."""
    text = outcome.output + outcome.errors
    if outcome.code is None:
        return f"still running after {SECONDS} s"
    if "Traceback (most" in text or "(traceback: " in text:
        return "a traceback"
    if outcome.code == 0:
        return "accepted" if line.is_wrong else None
    if outcome.code != 2:
        return f"exit code {outcome.code}"
    messages = [text for text in outcome.errors.splitlines() if text.startswith("clipzoo: ")]
    return None if len(messages) == 1 and not outcome.output else f"{len(messages)} messages"


def _forked(line: Line, stem: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code: Any = 1
    try:
        os.setsid()
        for descriptor, suffix in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(stem.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        sys.argv = [line.script, *line.arguments]
        sys.path.insert(0, str((ROOT / line.script).parent))
        runpy.run_path(str(ROOT / line.script), run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _waited(pid: int) -> int | None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(pid, 9)
    os.waitpid(pid, 0)
    return None
