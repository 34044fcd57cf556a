"""Initial weights of a run, and the table of the loaded, resized, kept and unused tensors."""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clipzoo import io
from clipzoo.build import build_part
from clipzoo.distributed.launch import say
from clipzoo.distributed.world import World
from clipzoo.encoders.base import Tower
from clipzoo.encoders.weights import HINTS, Row, common_prefix, fill_tower
from clipzoo.errors import ConfigError, first_names, number_of
from clipzoo.exports.hub import load
from clipzoo.exports.open_clip import with_plain_towers
from clipzoo.io import weights as files
from clipzoo.loading import PAIR
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.runs.directory import LENGTH, config_of, run_at
from clipzoo.runs.identity import differing, flat, identity, with_variables
from clipzoo.training import checkpoint_files
from clipzoo.training.parts import Optimizer, Parts
from clipzoo.training.settings import Length
from clipzoo.types import Part, Progress, checked

TABLE = "init.csv"
TOWERS = ("image", "text")
SAME = {
    "image": ("mean", "std", "image_tower.heads", "image_tower.quick_gelu"),
    "text": (
        "tokenizer._target_", "text_tower.vocabulary", "text_tower.end_token", "text_tower.heads",
        "text_tower.quick_gelu", "text_tower.norm_eps",
    ),
}  # fmt: skip
"""Settings of the encoder on which trained weights depend, and which no tensor shape reveals."""
RESUME_FILES = ("metrics.jsonl", "frozen.pt", "frozen.json")
"""Other files that a run needs to resume; the logger removes later lines from metrics.jsonl."""
WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile add to all names."""
_IMAGE = ("visual.head.proj", "visual.head.mlp.fc2", "visual.attnpool.c_proj", "visual.trunk.head", "visual.trunk.fc",
          "visual.trunk.head.fc", "visual_projection")  # fmt: skip
_TEXT = ("text.text_projection", "text.proj", "text.proj.2", "text_projection")
COUNTERPARTS = {
    "head.image_projection": ("visual.proj", *(f"{name}.weight" for name in _IMAGE)),
    "head.text_projection": ("text_projection", "text.text_projection", *(f"{name}.weight" for name in _TEXT)),
    "head.image_bias": tuple(f"{name}.bias" for name in _IMAGE),
    "head.text_bias": tuple(f"{name}.bias" for name in _TEXT),
    "head.log_scale": ("logit_scale", "objective.scale.log_scale"),
    "objective.scale.log_scale": ("logit_scale", "head.log_scale"),
    "objective.bias": ("logit_bias",),
}
"""Our tensor -> its names in other models, those of open_clip and transformers first. The ".weight" of a linear map is
transposed."""
BIASES = ("head.image_bias", "head.text_bias")
PROJECTIONS = ("head.image_projection", "head.text_projection")


def initialise(
    model: Model,
    folder: Path,
    plain: Mapping[str, Any],
    values: Mapping[str, Any],
    parts: Parts,
    trust: Collection[str],
    world: World,
) -> list[Row]:
    """Load the weights of `init` into the model of a new run, and write the checkpoint of `init.resume` to its folder.

    parts: with an open dataset. Returns the outcome of each tensor; none if the run resumes from its own checkpoint.
    """
    has_weights, source = "digests" in values["init"], plain["init"].get("resume")
    if not has_weights and source is None:
        return []
    if world.run_on_first(lambda: checkpoint_files.newest(folder / "checkpoints")) is not None:
        return []
    if source is not None and files.is_of_other_program(Path(with_variables(source))):
        return world.run_on_first(lambda: convert_checkpoint(source, folder, model, plain, parts))
    rows: list[Row] = []
    if has_weights:
        rows = build_part(values["init"], trust, InitialWeights).load(model, values, trust, parts.objective)
    if source is not None:
        world.run_on_first(lambda: copy_checkpoint(source, folder, plain, parts, trust))
    return rows


def report_initial_weights(rows: Sequence[Row], folder: Path) -> None:
    """Write <folder>/init.csv, a line per tensor of the model and per unused one of the source; print a summary."""
    if not rows:
        return
    from pandas import DataFrame  # takes half a second to import

    table = DataFrame(rows)
    for key in ("shape", "source_shape"):
        table[key] = table[key].map(lambda shape: "x".join(map(str, shape)))
    io.write_whole(folder / TABLE, table.to_csv(index=False))
    parts = []
    for part in (*TOWERS, "head", "objective"):
        if counts := Counter(row.outcome for row in rows if row.part == part):
            parts.append(f"{part}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}")
    if left_out := sum(row.outcome == "left out" for row in rows):
        parts.append(f"{number_of(left_out, 'tensor')} of the source left out")
    say(f"initial weights: {'; '.join(parts)} ({folder / TABLE})")


@checked
class InitialWeights(Part):
    """Initial weights of the model.

    weights: source for the whole model: a run directory, one of its checkpoints, a .safetensors file, an exported
        folder, "open_clip:NAME/TAG", "transformers:NAME", "timm" or "huggingface" (the pretrained weights of the
        encoder, or "timm:NAME").
    image, text, head: source for one part, in place of `weights`; "random" keeps the random initial values. The
        objective's learned scale and bias come with the head.
    leave_out: patterns of names of tensors to ignore, such as "logit_bias"; the run does not start if another tensor
        of the source is unused.
    digests: SHA-256 of the weights, by argument; set when the configuration is checked.
    resume: a run, one of its checkpoints, or a checkpoint of open_clip's training, from which the run continues; see
        `clipzoo.initial`.
    """

    def __init__(
        self,
        weights: str | None,
        image: str | None,
        text: str | None,
        head: str | None,
        leave_out: list[str],
        digests: dict[str, str] | None = None,
        resume: str | None = None,
    ) -> None:
        self._sources: dict[str, tuple[str, str]] = {}
        for part, name in (("image", image), ("text", text), ("head", head)):
            if (source := name or weights) is not None and source != files.RANDOM:
                self._sources[part] = f"init.{part if name else 'weights'}", source
        self._leave_out = leave_out

    def load(
        self, model: Model, config: Mapping[str, Any], trust: Collection[str] = (), objective: Objective | None = None
    ) -> list[Row]:
        """Fill the model, built from `config`, and its objective in place, and return the outcome of each tensor.

        Raises ConfigError if weights are missing, do not fit, or are unused and not matched by `leave_out`.
        """
        sources: dict[str, Source] = {}
        for part, (key, name) in self._sources.items():
            tower = model.encoder.towers.get(part)
            # "timm" without a name means the weights of this tower.
            shared = part if name in files.REGISTRIES else name
            place = f"{key}={name}"
            if part in TOWERS and tower is None:
                raise ConfigError(f"{place}: {type(model.encoder).__name__} has no attribute {part}_tower to fill")
            if shared not in sources:
                sources[shared] = read_source(name, key, tower, trust)
                for tensor, value in sources[shared].state.items():
                    if not any(fnmatchcase(tensor, pattern) for pattern in self._leave_out):
                        sources[shared].used[tensor] = value
            source = sources[shared]
            if tower is not None:
                # `from_model:NAME` equals every value.
                before, now = (flat(with_plain_towers(of["encoder"])) for of in (source.config or config, config))
                changed = differing(before, now)
                for setting in SAME[part]:
                    if setting in changed and before.get(setting) is not None and now.get(setting) is not None:
                        raise ConfigError(
                            f"{place} was trained with encoder.{setting}={before[setting]}, this run has "
                            f"{now[setting]}: give encoder.{setting}={before[setting]}"
                        )
                text = with_plain_towers(config["encoder"])["text_tower"]
                vocabulary = text.get("vocabulary") if isinstance(text, Mapping) else None
                rows = fill_tower(part, tower, source.used, place, vocabulary)  # type: ignore[arg-type]
            else:
                rows = fill_head(model.head, source.used, place, is_required=key == "init.head")
                rows += [] if objective is None else fill_objective(objective, source.used)
            source.filled[part] = rows
        rows = [row for source in sources.values() for rows in source.filled.values() for row in rows]
        loaded = {row.source for row in rows}
        if unused := [name for source in sources.values() for name in _unused(source, model)]:
            # The shortest patterns that match all unused tensors and no used one.
            patterns: dict[str, None] = {}
            for name in unused:
                stems = (name[: place + 1] for place, letter in enumerate(name) if letter == ".")
                free = (f"{stem}*" for stem in stems if not any(used.startswith(stem) for used in loaded))
                patterns[next(free, name)] = None
            arguments = " ".join(f"{key}={name}" for key, name in dict.fromkeys(self._sources.values()))
            raise ConfigError(
                f"{arguments} has tensors that this model does not use: {first_names(unused)}. Choose the encoder, "
                f"head or objective that has them, or give 'init.leave_out=[{','.join(patterns)}]'"
            )
        return rows + [
            Row("", "left out", source=name, source_shape=tuple(value.shape))
            for source in sources.values()
            for name, value in source.state.items()
            if name not in loaded
        ]


def _unused(source: Source, model: Model) -> Iterator[str]:
    """Yield the names of weights in a source that belong to the parts it fills but are not used by them."""
    filled = source.filled
    used = {row.source for rows in filled.values() for row in rows}
    prefixes = tuple(
        common_prefix(row.source for row in filled[part] if row.source) for part in TOWERS if part in filled
    )
    # A source that fills one tower may also contain the other tower, under another prefix.
    other_hints = {hint for part in TOWERS if part not in filled for hint in HINTS[part]}
    towers = [tower for part, tower in model.encoder.towers.items() if part in filled]
    ignored = {name for tower in towers if isinstance(tower, Tower) for name in tower.left_out}
    is_of_clipzoo = any(name.startswith("encoder.") for name in source.state)
    for name, value in source.used.items():
        if name in used or not value.is_floating_point() or ignored & {*name.split(".")}:
            continue
        in_clip = any(name in names for names in COUNTERPARTS.values())
        is_of_head = name.startswith(("head.", "objective.")) if is_of_clipzoo else in_clip
        is_of_tower = len(filled) == 3 or (name.startswith(prefixes) and not any(hint in name for hint in other_hints))
        if (is_of_head and "head" in filled) or (not is_of_head and is_of_tower):
            yield name


# Read the weights of a source; tensors have the names of its library.


@dataclass(frozen=True)
class Source:
    """Tensors by name. config: the model's configuration in clipzoo's form; None if unknown.

    used: tensors that are not left out. filled: rows of the table, by the part that this source fills.
    """

    state: Mapping[str, Tensor]
    config: Mapping[str, Any] | None = None
    used: dict[str, Tensor] = field(default_factory=dict)
    filled: dict[str, list[Row]] = field(default_factory=dict)


def read_source(name: str, key: str, tower: nn.Module | None, trust: Collection[str] = ()) -> Source:
    """Read the weights `key=name`. tower: its pretrained weights are meant by `timm` and `huggingface` without a name.

    Raises ConfigError if there are no such weights, or the file contains objects other than tensors.
    """
    try:
        if files.registry_of(name) is None:
            path = files.weights_file(name, key)
            if files.is_sharded(path) or (files.is_checkpoint(path) and (files.run_of(path) / "config.yaml").exists()):
                model = load(path, trust=tuple(trust))
                objective = checkpoint_files.read(path, without=("optimizer", "model")).get("objective", {})
                named = {f"objective.{name}": value for name, value in objective.items()}
                learned = {name: value for name, value in named.items() if name in COUNTERPARTS}
                return Source(model.state_dict() | learned, model.config)
            content = files.read_tensors(path)
            for wrapper in ("state_dict", "model"):
                if isinstance(content.get(wrapper), dict):
                    content = content[wrapper]
            return Source(_tensors(content))
        place = name.partition(":")[2].removeprefix("local-dir:") or name
        with files.from_hub(place, f"{key}={name} cannot be loaded", f"Without a network, give {files.FORMS_ON_DISK}"):
            return _from_registry(name, key, tower)
    except ConfigError as error:
        raise ConfigError(str(error) if f"{key}=" in str(error) else f"{key}={name}: {error}") from error


def _tensors(content: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a mapping, by names without the prefixes of wrappers."""
    state = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    while state and (prefixes := [one for one in WRAPPERS if all(name.startswith(one) for name in state)]):
        state = {name.removeprefix(prefixes[0]): value for name, value in state.items()}
    return state


def _from_registry(name: str, key: str, tower: nn.Module | None) -> Source:
    registry, model_name = files.registry_of(name), name.partition(":")[2]
    trunk: Any = getattr(tower, "trunk", None)
    if registry in ("open_clip", "transformers"):
        loaded = load(name)
        state = loaded.state_dict()
        if PAIR in loaded.config:
            state["logit_bias"] = torch.tensor(loaded.config[PAIR]["bias"])
        return Source(state, loaded.config)
    if registry == "timm":
        from clipzoo.encoders.image import timm_trunk

        if not model_name:
            if not (settings := getattr(trunk, "pretrained_cfg", None)):
                raise ConfigError(f"{key}=timm: this tower is not from timm: give timm:NAME, or another encoder/image")
            model_name = ".".join(filter(None, (settings["architecture"], settings.get("tag"))))
        return Source(timm_trunk(model_name, None, pretrained=True, options={}).state_dict())
    from clipzoo.encoders.huggingface import pretrained_model

    model_name = model_name or str(getattr(getattr(trunk, "config", None), "name_or_path", None) or "")
    if not model_name:
        raise ConfigError(f"{key}=huggingface: this tower has no name on the hub: give huggingface:NAME")
    peer, missing = pretrained_model(model_name)
    return Source({name: value for name, value in peer.state_dict().items() if name not in missing})


# Fill a head from another run, or from the projections and scalars of a CLIP model.


def fill_head(head: nn.Module, source: Mapping[str, Tensor], place: str, is_required: bool) -> list[Row]:
    """Copy all tensors of the head, or none if the source has none of them. place: key and value, for the message.

    Values that the configuration fixes, such as the temperature of head=cosine, are kept. Raises ConfigError if tensors
    or biases are missing on one side or have other shapes, or the source has no head and `is_required`.
    """
    targets = {f"head.{name}": value for name, value in head.state_dict().items()}
    fixed = {f"head.{name}" for name, parameter in head.named_parameters() if not parameter.requires_grad}
    values = {name: entry for name in targets if (entry := _find(name, source))}
    faults, remedies = [], []
    for name, target in targets.items():
        short = name.removeprefix("head.")
        # A bias that the source lacks is zero, as in a new head.
        if name not in values and name not in fixed and not (name in BIASES and not target.any()):
            faults.append(f"it has no {short}")
            remedies += ["+head.image_projection=false"] if name == PROJECTIONS[0] and PROJECTIONS[1] in values else []
        elif name in values and (value := values[name][1]).shape != target.shape:
            faults.append(f"{short} is {list(value.shape)} instead of {list(target.shape)}")
            if name in PROJECTIONS and value.shape[0] == target.shape[0]:
                remedies.append(f"head.embed_width={value.shape[1]}")
    if any(name not in targets and _find(name, source) for name in BIASES):
        faults.append("its projections have a bias")
        remedies.append(f"+head.bias={'true' if _find(BIASES[1], source) else 'image'}")
    if faults and (values or is_required):
        choice = " ".join(dict.fromkeys(remedies))
        raise ConfigError(
            f"{place} does not fit the head ({type(head).__name__}): {'; '.join(faults)}. Give "
            f"{choice + ', or ' if choice else ''}init.head=random for a head with the initial values of the seed"
        )
    return _copied("head", targets, values, fixed)


def fill_objective(objective: Objective, source: Mapping[str, Tensor]) -> list[Row]:
    """Copy the learned scale and bias of the objective that the source has."""
    learned = {f"objective.{name}": value for name, value in objective.named_parameters() if value.requires_grad}
    return _copied("objective", learned, {name: entry for name in learned if (entry := _find(name, source))}, set())


def _copied(
    part: Literal["head", "objective"],
    targets: Mapping[str, Tensor],
    values: Mapping[str, tuple[str, Tensor]],
    fixed: Collection[str],
) -> list[Row]:
    """Copy the values in place. A fixed target keeps its value."""
    rows = []
    for name, target in targets.items():
        short, shape = name.partition(".")[2], tuple(target.shape)
        origin, value = values.get(name, ("", target))
        if not origin or (name in fixed and not torch.equal(value.to(target), target)):
            rows.append(Row(part, "kept", short, shape))
            continue
        with torch.no_grad():
            target.copy_(value)
        rows.append(Row(part, "loaded", short, shape, origin, tuple(value.shape)))
    return rows


def _find(name: str, source: Mapping[str, Tensor]) -> tuple[str, Tensor] | None:
    """Return the source's name and value of one of our tensors. The source may store scalars as vectors of length 1."""
    for origin in (name, *COUNTERPARTS.get(name, ())):
        if origin in source:
            value = source[origin]
            transposed = origin.endswith(".weight") and name in PROJECTIONS
            return origin, value.mT if transposed else value.reshape(()) if value.numel() == 1 else value
    return None


# Continue from a checkpoint of another run, such as a cooldown that branches off a stable phase.
#
# The result must equal a run of this configuration trained from its first step. Hence the two runs may differ only in
# their length and their schedule, and their learning rates must be equal up to the checkpoint.


def copy_checkpoint(
    source: str, folder: Path, plain: Mapping[str, Any], parts: Parts, trust: Collection[str] = ()
) -> None:
    """Copy a checkpoint of another run into a new run directory, which then resumes from it. On the first rank.

    source: a run, whose newest usable checkpoint is taken, or a checkpoint. plain: the new configuration. Raises
    ConfigError if there is no checkpoint, or a run of this configuration would not have reached it.
    """
    place, (run, chosen_step) = f"init.resume={source}", run_and_step(source)
    stored = config_of(run)
    before, now = identity(stored), identity(plain)
    different = [key for key in differing(before, now) if key not in LENGTH and not key.startswith("optim.schedule.")]
    if different:
        changes = first_names([f"{key} {before.get(key)!r} -> {now.get(key)!r}" for key in different], most=6)
        raise ConfigError(
            f"{place} is a run of another configuration ({changes}): only its length and its schedule may differ"
        )
    if parts.objective.depends_on_length and _length(stored) != _length(plain):
        raise ConfigError(
            f"{place}: the steps of this objective depend on the length of the training: train from the first step"
        )
    # Steps from the start with equal learning rates in the two runs, below the new run's length.
    samples, batch = parts.dataset.epoch_rows, plain["trainer"]["global_batch"]
    recipes: list[Optimizer] = [build_part(with_variables(stored["optim"]), trust, Optimizer), parts.optimizer]
    # A schedule sets its rate on an optimizer.
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    totals = [_length(config).total_steps(samples) for config in (stored, plain)]

    def same(step: int) -> bool:
        before, now = (Progress(step, total, samples, batch) for total in totals)
        rates = [recipe.set_rate(optimizer, at) for recipe, at in zip(recipes, (before, now), strict=True)]
        after = [replace(at, step=step + 1) for at in (before, now)]
        averaging_weights = [parts.averaging(at) for at in after] if parts.averaging else [0.0, 0.0]
        return rates[0] == rates[1] and averaging_weights[0] == averaging_weights[1]

    last = min(totals[0], totals[1] - 1)
    equal = next((step for step in range(last) if not same(step)), last)
    if chosen_step is not None and chosen_step > equal:
        raise ConfigError(
            f"{place}: the learning rates of the two runs differ after step {equal}: give the run, or a checkpoint "
            "before"
        )
    path = checkpoint_files.newest(run / "checkpoints", at_most=equal if chosen_step is None else chosen_step)
    if path is None or (chosen_step is not None and files.step_of(path) != chosen_step):
        raise ConfigError(
            f"{place}: {run / 'checkpoints'} has no valid checkpoint of at most {number_of(equal, 'step')}, up to "
            "which the learning rates of the two runs are equal: train that run with a larger trainer.checkpoints.keep"
        )
    with io.explained(folder):
        for name in RESUME_FILES:
            if (run / name).exists():
                _copy(run / name, folder / name)
        for file in (path, files.mark_of(path)):
            # The mark is copied last: an interruption leaves an incomplete copy, which is replaced.
            target = io.below(folder, f"checkpoints/{file.name}")
            if target.is_dir():
                shutil.rmtree(target)
            target.unlink(missing_ok=True)
            io.make_folder(target.parent)
            if file.is_dir():
                shutil.copytree(file, target, copy_function=_link)
            else:
                _link(file, target)
    say(f"{folder} continues from step {files.step_of(path)} of {run}")


def run_and_step(source: str) -> tuple[Path, int | None]:
    """Return the run directory, and the number of steps of its checkpoint if the source names one."""
    path = Path(with_variables(source))
    return run_at(path, f"init.resume={source}"), files.step_of(path) if files.is_checkpoint(path) else None


def _length(config: Mapping[str, Any]) -> Length:
    trainer = config["trainer"]
    return Length(trainer["global_batch"], trainer["epochs"], trainer["steps"])


def _link(source: str | Path, target: str | Path) -> None:
    """Hard-link a file, which takes no space; copy it if the file system cannot."""
    try:
        os.link(source, target)
    except OSError:
        _copy(Path(source), Path(target))


def _copy(source: Path, target: Path) -> None:
    with io.readable(source, io.ANY_SIZE) as content, io.whole(target) as file:
        shutil.copyfileobj(content, file)


# Continue a training of open_clip from one of its checkpoints, epoch_5.pt or epoch_latest.pt.

MOMENTS = ("exp_avg", "exp_avg_sq")
REMEDY = "give a checkpoint of open_clip's trainer (3.3), or init.weights=FILE to start from the weights only"


def convert_checkpoint(source: str, folder: Path, model: Model, plain: Mapping[str, Any], parts: Parts) -> list[Row]:
    """Write a checkpoint of open_clip's trainer as the first checkpoint of a new run, which resumes from it.

    Weights, AdamW's moments and the loss scaling are converted; the learning rate and the batches follow from the
    configuration and the step. On the first rank; overwrites the model and the objective. plain, parts: as in
    `copy_checkpoint`. Returns the outcome of each tensor.

    Raises ConfigError if the file is not such a checkpoint, or the configuration does not continue its training.
    """
    path, place, objective = Path(with_variables(source)), f"init.resume={source}", parts.objective
    optimizer, tuning = parts.optimizer.build(model, objective), parts.tuning
    has_weights = any(plain["init"].get(key) is not None for key in ("weights", *TOWERS, "head"))
    others = [*model.head.parameters()]
    is_tuned = tuning and (tuning.frozen_towers(model.encoder) or tuning.factors(model.encoder, others))
    if has_weights or is_tuned or parts.averaging or type(optimizer) is not torch.optim.AdamW:
        raise ConfigError(
            f"{place} continues with all weights of open_clip's AdamW at one learning rate and has no average: give "
            "optim=adamw, and leave out average, tune and other sources of init"
        )
    new_scaler = torch.amp.GradScaler("cpu").state_dict()
    content = {"scaler": new_scaler, **files.read_tensors(path, REMEDY)}
    io.require_fields(path, content, {"epoch": int, "state_dict": dict, "optimizer": dict, "scaler": dict}, REMEDY)
    io.require_fields(path, content["scaler"], dict.fromkeys(new_scaler, (int, float)), REMEDY)
    weights, epochs = _tensors(content["state_dict"]), max(content["epoch"], 1)
    settings, moments = _adamw_state(path, content["optimizer"], weights)
    for key in ("betas", "eps", "weight_decay"):
        if (value := optimizer.param_groups[0][key]) != settings[key]:
            raise ConfigError(f"{place} was trained with {key}={settings[key]}: set optim.{key}, which is {value}")

    # open_clip saves after whole epochs. AdamW does not count the steps that fp16's loss scaling skips: at most 2%.
    updates, samples, batch = settings["step"], parts.dataset.epoch_rows, plain["trainer"]["global_batch"]
    total, epoch_steps = parts.settings.total_steps(samples), samples / batch
    last = min(updates + max(epochs, 20) + updates // 50, total)
    steps = [*range(math.ceil(updates / epochs) * epochs, last, epochs), updates]
    rates = [parts.optimizer.set_rate(optimizer, Progress(step - 1, total, samples, batch)) for step in steps]
    equal = [step for step, rate in zip(steps, rates, strict=True) if math.isclose(rate, settings["lr"], rel_tol=1e-6)]
    step = equal[0] if equal else total
    is_other_epoch = abs(step / epochs - epoch_steps) > 1 + epoch_steps / 50
    if step >= total or (is_other_epoch and plain["trainer"]["steps"] is None):
        raise ConfigError(
            f"{place} has made {updates} steps in {epochs} epochs, the last with learning rate {settings['lr']:.9g}; "
            f"this run has {total} steps, {epoch_steps:g} in an epoch, and the learning rate {rates[-1]:.9g}: give the "
            "trainer.global_batch, optim.schedule and trainer.epochs of that training, or trainer.epochs=null and its "
            "trainer.steps"
        )

    def fill(tensors: Mapping[str, Tensor]) -> list[Row]:
        rows = fill_head(model.head, tensors, place, is_required=False) + fill_objective(objective, tensors)
        for part, tower in model.encoder.towers.items():
            rows += fill_tower(part, tower, tensors, place, None)  # type: ignore[arg-type]
        return rows

    # The moments take the way of the weights through the model: the same names and transpositions.
    if parts.settings.precision == "float64":
        model.double(), objective.double()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for moment in MOMENTS:
        fill({**weights, **{name: entry[moment] for name, entry in moments.items()}})
        for parameter in parameters:
            optimizer.state[parameter] |= {moment: parameter.detach().clone(), "step": torch.tensor(float(updates))}
    rows = fill(weights)
    loaded = [row for row in rows if row.outcome == "loaded"]
    learned = {f"head.{name}" for name, parameter in model.head.named_parameters() if parameter.requires_grad}
    learned |= {f"objective.{name}" for name in objective.state_dict()}
    lacking = sorted(learned - {f"{row.part}.{row.tensor}" for row in loaded})
    if lacking or (unused := sorted(moments.keys() - {row.source for row in loaded})):
        fault = "has no" if lacking else "has other tensors than this model:"
        raise ConfigError(
            f"{place} {fault} {first_names(lacking or unused)}: give its encoder and sizes, head=clip, and "
            "objective=infonce or siglip"
        )
    state = {
        "step": step, "data": parts.dataset.history, "spent": {},
        "counters": {}, "model": model.state_dict(), "objective": objective.state_dict(),
        "optimizer": optimizer.state_dict(), "scaler": content["scaler"],
    }  # fmt: skip
    checkpoint_files.save(folder / "checkpoints", step, state, {}, keep=1)
    say(f"{folder} continues from step {step} of {path}")
    return rows


def _adamw_state(path: Path, stored: Any, weights: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return AdamW's step, learning rate and settings, and its moments by the names of the weights.

    stored: state of the optimizer, whose parameters have no names. Their order is that of open_clip_train/main.py: as
    in the model, first those without weight decay. Raises DamagedFileError if it is another optimizer.
    """
    statistics, named = ("running_mean", "running_var"), ("bn", "ln", "bias", "logit_scale")
    names = [name for name, value in weights.items() if value.is_floating_point() and not name.endswith(statistics)]
    without = [name for name in names if weights[name].ndim < 2 or any(part in name for part in named)]
    names = [*without, *(name for name in names if name not in without)]
    try:
        groups, entries = stored["param_groups"], stored["state"]
        if not ({"betas", "fused"} <= groups[0].keys() and groups[0].get("decoupled_weight_decay", True)):
            raise ValueError("its optimizer is not torch's AdamW")
        counts = [len(group["params"]) for group in groups]
        if counts != [len(without), len(names) - len(without)]:
            raise ValueError(f"its optimizer has {counts} of {len(names)} tensors without and with weight decay")
        indices = [index for group in groups for index in group["params"]]
        moments = {name: entries[index] for name, index in zip(names, indices, strict=True)}
        if any(moments[name][moment].shape != weights[name].shape for name in names for moment in MOMENTS):
            raise ValueError("its moments have other shapes than its weights")
        settings: dict[str, Any] = {key: float(groups[1][key]) for key in ("lr", "eps", "weight_decay")}
        (settings["step"],) = {int(entry["step"]) for entry in moments.values()}
        settings["betas"] = tuple(map(float, groups[1]["betas"]))
        if settings["weight_decay"] and (matrices := [name for name in without if weights[name].ndim >= 2]):
            raise ValueError(f"it trained {first_names(matrices)} without weight decay")
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise io.DamagedFileError(path, f"cannot be continued: {error}", REMEDY) from None
    return settings, moments
