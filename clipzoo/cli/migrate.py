"""Overrides for the command line of another program. `migrate.yaml` has its flags and what becomes of each."""

from __future__ import annotations

import argparse
import math
import re
import shlex
import string
from ast import literal_eval
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from clipzoo.cli.arguments import Parser, number_in
from clipzoo.config.vocabulary import Count
from clipzoo.errors import ConfigError, nearest
from clipzoo.io import MB, read_bytes, read_json, read_yaml

TABLE = read_yaml(Path(__file__).with_name("migrate.yaml"))
TABLE["open_clip"] |= {
    flag: {"only": "main", "none": reason, "default": default, "type": "flag" if default is False else
           type(default).__name__}
    for reason, flags in TABLE["unavailable"].items() for flag, default in flags.items()
}  # fmt: skip
PROGRAMS = {
    "open_clip": re.compile(r"open_clip_train\.main|(.*/)?(training|open_clip_train)/main\.py"),
    "clip_benchmark": re.compile(r"(.*/)?clip_benchmark(\.cli|/cli\.py)?"),
}
"""Flags in migrate.yaml -> the word of a command that names the program."""
TITLES = {"same": "No override needed", "none": "No counterpart", "differs": "Different by design"}


def migrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Print the overrides for a training of open_clip or an evaluation of CLIP_benchmark, with reasons.

    clipzoo migrate 'torchrun --nproc_per_node 8 -m open_clip_train.main --model ViT-B-32 --train-data ...'
    clipzoo migrate python -m open_clip_train.main --model ViT-B-32 --train-data ...
    clipzoo migrate logs/NAME/params.txt            the settings that a training of open_clip wrote
    clipzoo migrate 'clip_benchmark eval --model ViT-B-32 --pretrained openai --dataset cifar10 --dataset_root data'

    The command is read and never executed.
    """
    parser.add_argument("--command", action="store_true", help="print only the commands of clipzoo")
    parser.add_argument("--ranks", type=number_in(Count), help="processes, where the command does not say")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND", help="a command, or a params.txt")
    parser.set_defaults(run=migrate)


def migrate(options: argparse.Namespace) -> None:
    is_file = len(options.words) == 1 and options.words[0].endswith(".txt")
    given = read_parameters(Path(options.words[0])) if is_file else read_command(options.words)
    given.ranks = options.ranks or given.ranks
    if not given.ranks:
        raise ConfigError("the command does not say how many processes it starts: give clipzoo migrate --ranks N ...")
    (training if given.program == "open_clip" else evaluation)(given)
    print("\n".join([*([] if options.command else [*given.explanation(), ""]), *given.commands]))


class Given:
    """A command, and the commands of clipzoo in its place.

    program: its flags in migrate.yaml. flags: the given ones with their values. values: all, with defaults.
    launcher: words before the program. ranks: number of processes; 0 if unknown.
    overrides: with their reasons. notes: lines of the sections TITLES. commands: in their order.
    """

    def __init__(self, program: str, flags: dict[str, Any], launcher: list[str], ranks: int, is_main: bool) -> None:
        self.program, self.flags, self.launcher, self.ranks = program, flags, launcher, ranks
        self.values: dict[str, Any] = {}
        for flag, entry in TABLE[program].items():
            default = entry.get("default", False if entry.get("type") == "flag" else None)
            self.values[flag] = flags.get(flag, entry.get("main", default) if is_main else default)
        self.overrides: dict[str, str] = {}
        self.notes: dict[str, list[str]] = {section: [] for section in TITLES}
        self.commands: list[str] = []

    def override(self, facts: Mapping[str, Any]) -> None:
        """Add the overrides of the table. facts: values of other fields than flags; None leaves an override out."""
        values = {**self.values, **facts}
        for flag, entry in TABLE[self.program].items():
            if isinstance(names := entry.get("choices"), dict) and values[flag] is not None:
                values[flag] = names[values[flag]]
        for template, flags in TABLE["overrides"][self.program].items():
            fields = [name for _, name, _, _ in string.Formatter().parse(template) if name]
            if all(values[name] is not None for name in fields):
                override = template.format_map({name: in_hydra(values[name]) for name in fields})
                self.overrides[override] = self.reason(*flags)
        for flag in self.flags:
            for template in TABLE[self.program][flag].get("becomes", "").split():
                self.overrides[template.format(in_hydra(values[flag]))] = self.reason(flag)

    def reason(self, *flags: str) -> str:
        """Return those of the flags that were given, with values; or the default of the first one."""
        given = [f"--{flag} {in_hydra(self.flags[flag])}".removesuffix(" true") for flag in flags if flag in self.flags]
        return " ".join(given) or f"--{flags[0]} {in_hydra(self.values[flags[0]])} (default)"

    def command(self, *words: str) -> str:
        """Return a command of clipzoo, its subcommand first, with the overrides after these words."""
        is_torchrun = any(word.endswith("torchrun") for word in self.launcher)
        start = [*self.launcher, *["--no-python"] * is_torchrun, "clipzoo", words[0]]
        # Single quotes in double quotes are easier to read than shlex's form.
        overrides = [
            f'"{word}"' if "'" in word and not {*word} & {*'"$`\\!'} else shlex.quote(word)
            for word in (*words[1:], *self.overrides)
        ]
        return " \\\n  ".join([shlex.join(start), *overrides])

    def explanation(self) -> Iterator[str]:
        """Yield the overrides with their reasons, and what the table says about the flags."""
        width = min(max(map(len, self.overrides)), 60)
        yield from (f"{override:{width}}   {reason}" for override, reason in self.overrides.items())
        for flag, entry in TABLE[self.program].items():
            for section in TITLES.keys() & entry.keys() if flag in self.flags or "always" in entry else ():
                self.notes[section].append(f"--{flag}: {entry[section]}")
            if "absent" in entry and flag not in self.flags and self.ranks > 1:
                self.notes["differs"].append(f"without --{flag}: {entry['absent']}")
        for section, lines in self.notes.items():
            yield from ["", f"{TITLES[section]}:", *lines] if lines else []
        if self.program == "open_clip":
            yield from ["", "To continue a run of open_clip, add init.resume=.../checkpoints/epoch_K.pt"]


def literal(text: str) -> Any:
    """Return the number, truth value or list that a text is in Python, or else the text."""
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def in_hydra(value: Any) -> str:
    """Return a value in the grammar of overrides."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(in_hydra, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {in_hydra(inner)}" for key, inner in value.items()) + "}"
    if not isinstance(value, str):
        return "null" if value is None else str(value).lower()
    is_plain = re.fullmatch(r"[A-Za-z./][\w./:@+-]*", value)
    return value if is_plain else "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def read_command(words: Sequence[str]) -> Given:
    """Read a command, given as one text or as its words. Raises ConfigError, also for a flag given twice."""
    try:
        words = shlex.split(words[0].replace("\\\n", " ")) if len(words) == 1 else words
    except ValueError as error:
        raise ConfigError(f"the command cannot be split into words: {error}") from None
    starts = [(i, name) for i, word in enumerate(words) for name, form in PROGRAMS.items() if form.fullmatch(word)]
    if not starts:
        raise ConfigError("give a command of open_clip_train.main or clip_benchmark, or the params.txt of a training")
    if variables := [word for word in words if "$" in word]:
        raise ConfigError(f"{variables[0]} has a variable of the shell: write its value, or give the words unquoted")
    start, program = starts[0]

    # The flags and their values, read as the program does.
    given = [word for word in words[start + 1 :] if (program, word) != ("clip_benchmark", "eval")]
    parser, entries = Parser(program, add_help=False), TABLE[program]
    for flag, entry in entries.items():
        names, kind = [f"--{name}" for name in (flag, entry.get("alias")) if name], entry.get("type")
        if kind == "flag":
            parser.add_argument(*names, dest=flag, action="store_true", default=None)
        else:
            parser.add_argument(
                *names, dest=flag, type={"int": int, "float": float}.get(kind, str), choices=entry.get("choices"),
                nargs="*" if "many" in entry else None, action="append" if "repeatable" in entry else "store",
            )  # fmt: skip
    options, unknown = parser.parse_known_args(given)
    if unknown:
        near = nearest(unknown[0].partition("=")[0], [f"--{flag}" for flag in entries])
        raise ConfigError(f"{program} has no flag {unknown[0]}{near}")
    counts = Counter(word.partition("=")[0].removeprefix("--") for word in given if word.startswith("--"))
    if twice := [name for name, count in counts.items() if count > 1 and "repeatable" not in entries.get(name, {})]:
        raise ConfigError(f"--{twice[0]} is given twice")
    flags = {flag: value for flag in entries if (value := getattr(options, flag)) is not None}
    for flag in flags:
        if entries[flag].get("type") == "pairs":
            flags[flag] = {key: literal(value) for key, _, value in (pair.partition("=") for pair in flags[flag])}

    launcher = [word for word in words[:start] if not re.fullmatch(r"(.*/)?python[\d.]*|-u|-m", word)]
    launcher = ["torchrun" if word == "torch.distributed.run" else word for word in launcher]
    processes = re.findall(r"(?<!\S)(?:--nnodes|--nproc.per.node|--ntasks|-n)[= ](\d+)(?!\S)", " ".join(launcher))
    # Without these options, torchrun starts one process, and srun as many as its job has.
    is_unknown = not processes and any(word.endswith(("srun", "mpirun", "horovodrun")) for word in launcher)
    is_main = any(entries[flag].get("only") == "main" for flag in flags)
    return Given(program, flags, launcher, 0 if is_unknown else math.prod(map(int, processes)), is_main)


def read_parameters(path: Path) -> Given:
    """Read the params.txt of a training of open_clip, a line `name: value` for each flag. Raises ConfigError."""
    try:
        lines = dict(line.split(": ", 1) for line in read_bytes(path, MB).decode().splitlines())
        ranks, is_main = int(lines["world_size"]), "fsdp" in lines
    except (ValueError, KeyError):
        raise ConfigError(f"{path} is not the params.txt of a training of open_clip") from None
    names = {entry.get("dest", flag.replace("-", "_")): flag for flag, entry in TABLE["open_clip"].items()}
    defaults = Given("open_clip", {}, [], ranks, is_main).values
    if unknown := sorted(lines.keys() - names.keys() - {*TABLE["derived"]}):
        raise ConfigError(f"{path}: open_clip has no flag for {unknown[0]}{nearest(unknown[0], list(names))}")
    flags: dict[str, Any] = {}
    for name in sorted(lines.keys() & names.keys()):
        entry, text = TABLE["open_clip"][names[name]], lines[name]
        value = literal(text) if "type" in entry or "many" in entry or text == "None" else text
        if name == "device":
            value = text.partition(":")[0]
        if value not in (defaults[names[name]], None, "", [], {}):
            flags[names[name]] = value
    launcher = ["torchrun", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return Given("open_clip", flags, launcher, ranks, is_main)


def training(given: Given) -> None:
    """Set the overrides and commands for a command of open_clip's trainer; an evaluation without training data."""
    values = given.values

    # The model, its initial weights and the parameters that train. Hugging Face's text towers start pretrained.
    model, weights, resume, text_weights = values["model"], values["pretrained"], values["resume"], None
    model += "-quickgelu" * (values["force-quick-gelu"] and not model.endswith("-quickgelu"))
    config = model_config(model)
    text, vision = config.get("text_cfg", {}), config.get("vision_cfg", {})
    is_resnet = isinstance(vision.get("layers"), list)
    if not weights and text.get("hf_model_pretrained", True) and "hf_model_name" in text:
        text_weights = f"huggingface:{text['hf_model_name']}"
    if ":" in model:
        # open_clip ignores --pretrained for these models, and starts from random weights if a folder has none.
        suffixes = {file.suffix for file in Path(model.removeprefix("local-dir:")).glob("*")}
        has_weights = model.startswith("hf-hub:") or suffixes & {".safetensors", ".bin", ".pth"}
        weights = f"open_clip:{model}" * bool(has_weights)
    elif weights and "/" not in weights and not Path(weights).suffix:
        weights = f"open_clip:{model}/{weights}"
    if resume not in (None, "latest"):
        weights = text_weights = None
    if "multimodal_cfg" in config:
        given.notes["none"].append(f"--model {model}: the captioning loss; the towers train with the contrastive loss")
    sides = values["force-image-size"] or [None]
    facts: dict[str, Any] = {
        "model": model, "weights": weights or None, "text_weights": text_weights,
        "resume": None if resume == "latest" else resume, "image_size": sides[0] if len({*sides}) == 1 else sides,
        "bias": True if text.get("proj_bias") else "image" if is_resnet or vision.get("timm_proj_bias") else None,
        "image_projection": False if vision.get("timm_proj") == "none" else None,
    }  # fmt: skip
    for tower, flag in (("image", "lock-image-unlocked-groups"), ("text", "lock-text-unlocked-layers")):
        # The last group of open_clip is the projection, which belongs to the head here; not in Hugging Face's towers.
        layers = max(values[flag] - (tower == "image" or "hf_model_name" not in text), 0)
        facts[f"{tower}_tuning"] = ("last_k" if layers else "frozen") if values[f"lock-{tower}"] else None
        facts[f"{tower}_layers"] = layers if layers and values[f"lock-{tower}"] else None

    # Data.
    if values["dataset-type"].startswith("synthetic"):
        raise ConfigError("--dataset-type synthetic: run `clipzoo world`, and give --train-data data/demo/train")
    sources: list[Any] = [_shards(path, given) for path in (values["train-data"] or "").split("::")]
    if factors := values["train-data-upsampling-factors"]:
        if factors.count("::") + 1 != len(sources):
            raise ConfigError(f"--train-data-upsampling-factors={factors} has not one factor for each source")
        weighted = zip(sources, map(float, factors.split("::")), strict=True)
        sources = [{"path": path, "weight": weight} for path, weight in weighted]
    values["aug-cfg"] = {"scale": (0.9, 1.0)} | (values["aug-cfg"] or {})
    facts["crop_scale"] = values["aug-cfg"]["scale"]
    facts["shards"] = sources if factors or len(sources) > 1 else sources[0]
    others = [name for name in values["aug-cfg"] if name != "scale"]
    given.notes["none"] += [f"--aug-cfg {name}: see data.flip and data.rand_augment" for name in others]

    # Optimizer. The defaults of AdamW depend on the name of the model.
    name, is_vit = values["opt"], "vit" in values["model"].lower()
    timm = None if name == "adamw" else name.removeprefix("timm/")
    defaults = {"lr": 5e-4, "beta1": 0.9, "beta2": 0.98 if is_vit else 0.999, "eps": 1e-6 if is_vit else 1e-8}
    if not name.startswith("timm/"):
        values |= {flag: value for flag, value in defaults.items() if values[flag] is None}
    elif values["lr"] is None:
        raise ConfigError(f"--opt {name} needs --lr")
    betas, eps = (values["beta1"], values["beta2"]), values["eps"]
    options = {"eps": eps, "momentum": values["momentum"], **(values["opt-kwargs"] or {})}
    options = {key: value for key, value in options.items() if value is not None and timm}
    facts |= {
        "timm": timm and "timm", "optimizer": timm, "options": options or None,
        "betas": betas if all(betas) else None, "adamw_eps": None if timm else eps,
    }  # fmt: skip

    # Batch, length and schedule. With the number of samples, the steps of open_clip's epochs are known.
    batch, accumulated, workers = values["batch-size"] * given.ranks, values["accum-freq"], max(1, values["workers"])
    samples = None if given.commands else values["train-num-samples"]  # not for tables, which are packed first
    steps = samples and math.ceil(math.ceil(samples / batch) / workers) * workers // accumulated
    if values["skip-scheduler"]:
        values |= {"lr-scheduler": "const", "warmup": 0}
    cooldown = values["epochs-cooldown"] if values["lr-scheduler"] == "const-cooldown" else None
    if cooldown is None and values["lr-scheduler"] == "const-cooldown":
        raise ConfigError("--lr-scheduler const-cooldown needs --epochs-cooldown")
    facts |= {
        "global_batch": batch * accumulated, "micro_batch": values["batch-size"] if accumulated > 1 else None,
        "epochs": "null" if steps else values["epochs"], "steps": steps and steps * values["epochs"],
        "cooldown_epochs": None if steps else cooldown, "cooldown_steps": steps and cooldown and steps * cooldown,
        "end": values["lr-cooldown-end"] if cooldown else 0.0,
        "checkpoint_steps": (steps and steps * given.flags.get("save-frequency", 0)) or None,
    }  # fmt: skip

    # Precision, loggers and evaluations.
    loggers = [name for name in ("tensorboard", "trackio", "wandb") if re.search(f"{name}|all", values["report-to"])]
    images, images_v2, pairs = values["imagenet-val"], values["imagenet-v2"], values["val-data"]
    root = Path(images or "data/downstream/imagenet/val")
    if root.parts[-2:] != ("imagenet", "val"):
        folder, root = shlex.quote(str(root.absolute())), Path("data/downstream/imagenet/val")
        given.commands.append(f"mkdir -p {root.parent} && ln -s {folder} {root}")
    intervals = [values["zeroshot-frequency"] if images or images_v2 else 0, values["val-frequency"] if pairs else 0]
    facts |= {
        "loggers": loggers[0] if len(loggers) == 1 else loggers or None,
        "project": values["wandb-project-name"] if "wandb" in loggers else None,
        "zero_shot": ["imagenet"] * bool(images) + ["imagenet_v2"] * bool(images_v2) or None,
        "root": str(root.parents[1]) if images else None, "prompts": "clip" if images or images_v2 else None,
        "validation": _shards(pairs, given) if pairs else None,
        "every_epochs": min(filter(None, intervals), default=None),
    }  # fmt: skip
    given.override(facts)
    given.overrides[f"trainer.global_batch={batch * accumulated}"] += f" x {given.ranks} ranks" * (given.ranks > 1)
    if values["train-data"]:
        given.commands.append(given.command("train"))
    else:
        given.overrides = {key: reason for key, reason in given.overrides.items() if key.startswith("eval.")}
        pretrained = None if ":" in model else values["pretrained"] or None
        words = [f"model={in_hydra(model)}", f"pretrained={in_hydra(pretrained)}", "eval=none"]
        given.commands.append(given.command("evaluate", *words))


def _shards(path: str, given: Given) -> str:
    """Return the shards of a source; first the commands that pack a table into them."""
    if given.values["dataset-type"] != "csv" and not path.endswith((".csv", ".tsv")):
        return path
    stem, columns = str(Path(path).with_suffix("")), (given.values["csv-img-key"], given.values["csv-caption-key"])
    if not path.endswith(".tsv") and given.values["csv-separator"] == "\t":
        given.commands.append(shlex.join(["ln", "-s", str(Path(path).absolute()), f"{stem}.tsv"]))
        path = f"{stem}.tsv"
    words = ["clipzoo", "shards", "make", path, f"{stem}_shards", "--image", columns[0], "--caption", columns[1]]
    given.commands.append(shlex.join(words))
    given.notes["differs"].append(f"{path}: paths of images are relative to the table, not to the working folder")
    return f"{stem}_shards"


def model_config(name: str) -> dict[str, Any]:
    """Return open_clip's settings of a model, none for the hub's. Does not import open_clip. Raises ConfigError."""
    if name.startswith("local-dir:"):
        file = Path(name.removeprefix("local-dir:")) / "open_clip_config.json"
        if not file.is_file():
            raise ConfigError(f"--model {name}: there is no {file}")
        return read_json(file, MB).get("model_cfg", {})
    package, stem = find_spec("open_clip"), name.replace("/", "-")
    if ":" in name or package is None or package.origin is None:
        return {}
    files = {path.stem: path for path in Path(package.origin).parent.glob("model_configs/*.json")}
    if stem not in files:
        raise ConfigError(f"open_clip has no model {name}{nearest(stem, list(files))}")
    return read_json(files[stem], MB)


def evaluation(given: Given) -> None:
    """Set the overrides and the commands, one for each model, for a command of CLIP_benchmark."""
    values, folder, tasks = given.values, given.values["dataset_root"], TABLE["tasks"]
    if folder.startswith(("http:", "https:")):
        raise ConfigError(f"--dataset_root {folder}: download the datasets, and give their folder")
    names: dict[str, list[str]] = {task: [] for task in tasks.values()}
    roots = set()
    for dataset in values["dataset"]:
        name, is_in_tars = dataset.removeprefix("wds/"), dataset.startswith("wds/")
        default = "zeroshot_retrieval" if name in TABLE["retrieval"] else "zeroshot_classification"
        task = default if values["task"] == "auto" else values["task"]
        if task not in tasks or name.startswith(("sugar_crepe", "winoground")):
            given.notes["none"].append(f"--dataset {dataset} --task {task}: tasks are {', '.join(tasks)}")
            continue
        # The folder of one dataset in tars; or a folder that has those of our catalogue.
        path = Path(folder.replace("{dataset}", name).replace("{dataset_cleaned}", name.replace("/", "-")))
        is_own = is_in_tars or "{" in folder
        roots.add(str(path.parent if is_own else path))
        names[tasks[task]].append(path.name if is_own else TABLE["datasets"].get(name, name.removeprefix("vtab/")))
    if len(roots) != 1:
        raise ConfigError(f"the datasets have {len(roots) or 'no'} parent folders: give those of one folder")
    is_in_tars = all(dataset.startswith("wds/") for dataset in values["dataset"])
    facts = {task: datasets or None for task, datasets in names.items()}
    given.override(facts | {"root": roots.pop(), "prompts": "set" if is_in_tars else "clip"})
    models = [name.partition(",")[::2] for name in values["pretrained_model"]]
    for model, pretrained in models or product(values["model"], values["pretrained"]):
        if not pretrained:
            raise ConfigError(f"--pretrained_model {model} is a collection or a file: give MODEL,PRETRAINED")
        weights = [] if ":" in model else [f"pretrained={in_hydra(pretrained)}"]
        given.commands.append(given.command("evaluate", f"model={in_hydra(model)}", *weights, "eval=none"))
