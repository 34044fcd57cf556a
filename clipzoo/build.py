"""Build the parts of a run from its checked configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from clipzoo.config import schema
from clipzoo.config.groups import CONF, options
from clipzoo.config.schema import HYDRA_KEYS, class_constant, filled, is_a, is_open
from clipzoo.config.trust import PACKAGE, TRUST_KEY, is_within, refusal, values_of
from clipzoo.distillation import Distillation
from clipzoo.encoders.base import Encoder, on_meta, require_as_large
from clipzoo.encoders.tuning import Tuning
from clipzoo.errors import ConfigError, PartError, TrainingError, first_line
from clipzoo.evaluation.suite import Suite
from clipzoo.heads.base import Head
from clipzoo.io import DamagedFileError
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.training.loggers import Logger
from clipzoo.training.parts import Averaging, Dataset, Optimizer, Parts, Teacher
from clipzoo.training.settings import Settings
from clipzoo.types import Part


def build_parts(plain: Mapping[str, Any], trust: Collection[str] = ()) -> Parts:
    """Build every part but the encoder. Raises ConfigError if one refuses its arguments, or cannot train the head."""
    suite = build_part(plain["eval"], trust, Suite)
    parts = Parts(
        settings=build_part(plain["trainer"], trust, Settings),
        head=build_head(plain, trust),
        objective=build_objective(plain, trust),
        dataset=build_part(plain["data"], trust, Dataset),
        evaluator=suite,
        optimizer=build_part(plain["optim"], trust, Optimizer),
        logger=build_part(plain["logger"], trust, Logger),
        tuning=build_part(plain["tune"], trust, Tuning) if "tune" in plain else None,
        averaging=build_part(plain["average"], trust, Averaging) if "average" in plain else None,
        seed=plain["seed"],
        teacher=build_part(plain["teacher"], trust, Teacher) if "teacher" in plain else None,
        distill=_seeded(plain, "distill", trust, Distillation) if "distill" in plain else None,
    )
    parts.require_compatible()
    if suite.validation is not None:
        parts.objective.require_value_of_unseen()
    return parts


def found_in_model(plain: Mapping[str, Any], trust: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of `from_model:NAME` in a configuration, by name; empty if it has none.

    The encoder is built on the meta device, without weights. trust: as in `build_part`.
    Raises ConfigError if the encoder cannot be built, or cannot serve the head.
    """
    if not any(is_open(value) for _, value in values_of(plain)):
        return {}
    with torch.device("meta"):
        encoder = build_part(filled(plain["encoder"], None), trust, Encoder)
    facts = dict(encoder.facts())
    complete = filled(plain, facts)
    faults = schema.faults(complete) or list(schema.broken(schema.RUN, complete))
    head = complete["head"]["_target_"] if "head" in complete else None
    if head and class_constant(head, "needs_tokens") and (towers := encoder.without_tokens()):
        faults.append(
            f"{' and '.join(towers)} has no tokens, or tokens of another width than its pooled features, and cannot "
            f"serve the heads {', '.join(heads_with_tokens())}: choose another encoder, or another head"
        )
    if faults:
        raise ConfigError("\n         ".join(faults))
    return facts


def heads_with_tokens() -> list[str]:
    """Return the options of the group `head` whose heads read tokens."""
    nodes = {name: yaml.safe_load((CONF / "head" / f"{name}.yaml").read_text()) for name in options("head")}
    return [name for name, node in nodes.items() if class_constant(node["_target_"], "needs_tokens")]


def build_part(node: Mapping[str, Any], trust: Collection[str] = (), kind: type = object) -> Any:
    """Build the object that a `_target_` node describes, and the nodes inside it, from plain values.

    This is the only place where a `_target_` becomes a class; strings are used verbatim, never interpolated.

    node: `_target_` and the arguments of the class; `_args_` and `_partial_` as in Hydra. trust: packages and classes
    that the node may name besides the parts of this package. kind: class or Protocol that the object must satisfy.

    Raises ConfigError if a class is neither a part nor trusted, its constructor refuses a value or fails, or the object
    is not of this kind.
    """
    target = node.get("_target_")
    constructor = part_class(target, trust)
    positional = _built(node.get("_args_", []), trust)
    named = {str(key): _built(value, trust) for key, value in node.items() if key not in HYDRA_KEYS}
    try:
        build = partial(constructor, *positional, **named)
        built = build if node.get("_partial_") else build()
    except (ConfigError, TrainingError):
        raise
    except Exception as error:
        raise PartError(f"{target} cannot be built: {first_line(error)}") from error
    if not is_a(built, kind):
        raise ConfigError(f"{target} is not of type {kind.__name__}: change the _target_ of its group")
    return built


def _built(value: Any, trust: Collection[str]) -> Any:
    if isinstance(value, Mapping):
        return build_part(value, trust) if "_target_" in value else {key: _built(value[key], trust) for key in value}
    return [_built(item, trust) for item in value] if isinstance(value, list) else value


def part_class(target: object, trust: Collection[str] = ()) -> Any:
    """Return the class with a dotted name. Raises ConfigError unless it is a part of this package or trusted."""
    if reason := refusal(target, trust):
        raise ConfigError(f"_target_={target} {reason}")
    module, _, name = str(target).rpartition(".")
    try:
        constructor = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"_target_={target} cannot be imported: {error}") from error
    origin = str(getattr(constructor, "__module__", ""))
    if is_within(module, (PACKAGE,)):
        is_part = isinstance(constructor, type) and issubclass(constructor, nn.Module | Part)
        is_allowed = is_part and is_within(origin, (PACKAGE,))
        reason = (
            f"is not a part of {PACKAGE}: it is not a head, objective, encoder or other class that runs are built from"
        )
    else:
        # A trusted package may import modules that are not trusted.
        is_allowed = callable(constructor) and is_within(origin, trust)
        reason = f"comes from {origin}: add {TRUST_KEY}={origin.partition('.')[0]} if you trust that package"
    if not is_allowed and target not in trust:
        raise ConfigError(f"_target_={target} {reason}")
    return constructor


def build_head(plain: Mapping[str, Any], trust: Collection[str] = ()) -> Head:
    """Build the head with initial weights drawn from `seed`."""
    return _seeded(plain, "head", trust, Head)


def build_objective(plain: Mapping[str, Any], trust: Collection[str] = ()) -> Objective:
    """Build the objective with initial parameters drawn from `seed`."""
    return _seeded(plain, "objective", trust, Objective)


def build_model(plain: Mapping[str, Any], head: Head | None = None, trust: Collection[str] = ()) -> Model:
    """Build encoder and head with initial weights of `seed`, also on `torch.device("meta")`. head: None builds it."""
    plain = filled(plain, found_in_model(plain, trust))
    return Model(_seeded(plain, "encoder", trust, Encoder), head or build_head(plain, trust))


def build_trained(
    plain: Mapping[str, Any],
    state: Mapping[str, Any],
    path: Path,
    remedy: str,
    trust: Collection[str] = (),
    dtype: torch.dtype | None = None,
    fixed: Collection[str] = (),
) -> Model:
    """Build encoder and head with stored weights. Names and shapes are compared before the model allocates memory.

    The configuration may come from a stranger: the model is built on the meta device first, with at most a few times as
    many parameters as there are stored tensors. Pretrained weights that the configuration names are not downloaded.

    state: tensors by their names in the model. path, remedy: their file, and the advice if it is damaged.
    trust: as in `build_part`. dtype: precision of the model; None for that of its constructors.
    fixed: names of tensors that keep the constructors' values where the state lacks them.

    Raises DamagedFileError if a tensor is missing, superfluous or has another shape (the message names the keys that
    set the model's shape), or the model computes buffers that are much larger than all weights.
    """
    plain = {**plain, "encoder": with_pretrained(plain["encoder"], lambda value: value is not True and value)}
    try:
        with on_meta(len(state)):
            model = build_model(plain, trust=trust)
    except PartError as error:
        raise DamagedFileError(path, f"does not fit the model of its configuration ({error})", remedy) from None
    expected_shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    for name in [*expected_shapes, *state]:
        value, expected = state.get(name), expected_shapes.get(name)
        shape = list(value.shape) if isinstance(value, Tensor) else None
        if shape == expected or (shape is None and name in fixed):
            continue
        # Keys that set the differing sizes; for a missing or superfluous tensor, the numbers of layers.
        keys, sizes = [], set(expected or ()) - set(shape or ())
        for key, setting in values_of(plain):
            layers = (shape is None or expected is None) and "layers" in key and name.startswith(key.rpartition(".")[0])
            if layers or (shape is not None and setting in sizes):
                keys.append(f"{key}={setting}")
        fault = f"{name} has shape {shape}, the model's has {expected}{' by ' if keys else ''}{', '.join(keys)}"
        raise DamagedFileError(path, f"does not fit the model of its configuration ({fault})", remedy)
    require_as_large(model, state.values(), path, remedy)
    model = build_model(plain, trust=trust).to(dtype)
    model.load_state_dict({**{name: value for name, value in model.state_dict().items() if name in fixed}, **state})
    return model


def with_pretrained(node: Any, change: Callable[[Any], Any]) -> Any:
    """Return a node with `change(value)` as the value of every key `pretrained`, at any depth."""
    if isinstance(node, Mapping):
        return {
            key: change(value) if key == "pretrained" else with_pretrained(value, change) for key, value in node.items()
        }
    return [with_pretrained(value, change) for value in node] if isinstance(node, list | tuple) else node


def _seeded(plain: Mapping[str, Any], name: str, trust: Collection[str], kind: type) -> Any:
    """Build a part whose initial weights depend only on the seed, not on the order of construction."""
    torch.manual_seed(plain["seed"])
    return build_part(plain[name], trust, kind)


def parameters_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
