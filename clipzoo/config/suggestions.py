"""Suggestions in error messages: the nearest valid key or option for a mistyped one."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from clipzoo.config.groups import option_file, options
from clipzoo.errors import nearest

FOREIGN_KEYS = {
    "accum_freq": "trainer.micro_batch", "batch_size": "trainer.global_batch", "beta1": "optim.betas",
    "beta2": "optim.betas", "checkpoint": "init.weights", "ckpt": "init.weights", "dataset": "data",
    "grad_clip_norm": "trainer.clip_gradient", "learning_rate": "optim.schedule.peak", "logs": "runs",
    "loss": "objective", "lr": "optim.schedule.peak", "model": "encoder", "pretrained": "init.weights",
    "report_to": "logger", "save_frequency": "trainer.save_every",
    "tensorboard": "logger=tensorboard", "train_data": "data.shards", "wandb": "logger=wandb",
    "warmup": "optim.schedule.warmup_steps", "wd": "optim.weight_decay",
}  # fmt: skip
"""Names that other programs, above all open_clip, use for our keys."""
FOREIGN_GROUPS = {"hydra/sweeper": "a search draws its points with search.sampler=tpe"}
"""Groups of Hydra's plugins whose work clipzoo does itself."""
FOREIGN_KEYS_OF_EVALUATION = {"checkpoint": "run", "ckpt": "run", "weights": "pretrained"}


def unknown_key(key: str, known: Sequence[str]) -> str:
    """Return the message for a key that does not exist."""
    names = FOREIGN_KEYS_OF_EVALUATION if "run" in known else FOREIGN_KEYS
    ours = names.get(key.rsplit(".", 1)[-1])
    return f"there is no key {key}" + (f"; did you mean {ours}?" if ours else nearest(key, known))


def group_not_chosen(group: str) -> str:
    """Return the message for a group inside another one, whose chosen option does not have it."""
    outer, _, inner = group.rpartition("/")
    having = [option for option in options(outer) if inner in _groups_of(outer, option)]
    return f"{group} is a group of {' and '.join(f'{outer}={option}' for option in having)}: choose it too"


def _groups_of(group: str, option: str) -> list[str]:
    """Return the names of the groups inside an option, by its list of defaults."""
    file = option_file(group, option)
    assert file is not None
    defaults = yaml.safe_load(file.read_text()).get("defaults", [])
    return [name.removeprefix("override ") for entry in defaults if isinstance(entry, dict) for name in entry]


def unknown_option(group: str, option: str) -> str:
    """Return the message for an option that its group does not have."""
    if group in FOREIGN_GROUPS:
        return f"there is no {group}={option}: {FOREIGN_GROUPS[group]}"
    names = options(group)
    folder = f"{option.split('/')[0]}/"
    # Options sorted into folders are many: list those of the same folder, or only the folders.
    listed = [name for name in names if name.startswith(folder)] or list(
        dict.fromkeys(f"{name.split('/')[0]}/..." if "/" in name else name for name in names)
    )
    near = nearest(option, names)
    if option == "null":  # means nothing, not the option with the most similar letters
        near = f"; did you mean {group}=none?" if "none" in names else ""
    return f"there is no {group}={option}{near} (options: {', '.join(listed)})"
