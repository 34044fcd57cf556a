"""Train a model: compose, check, build, fit, evaluate, report. `clipzoo train --help` lists the options."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from clipzoo import io
from clipzoo.cli import trials
from clipzoo.cli.arguments import Parser
from clipzoo.config import trust as overrides
from clipzoo.config.compose import checked, compose
from clipzoo.config.groups import CONF, FOREIGN_KEYS, hide_internal_options, own_folder
from clipzoo.config.schema import filled
from clipzoo.config.trust import trusted_names
from clipzoo.distributed import launch
from clipzoo.distributed.watchdog import exit_on_error, same_on_all_ranks
from clipzoo.errors import ConfigError, first_line, masked, number_of
from clipzoo.runs import record, sweep
from clipzoo.runs.directory import CAPTIONS, claim, created, evaluation_hint, find_run, has_ended
from clipzoo.runs.extension import length_hint
from clipzoo.runs.initial import with_digests
from clipzoo.runs.lock import RunLock
from clipzoo.runs.metric_key import of_weights
from clipzoo.runs.places.place import runs_of
from clipzoo.runs.variables import with_variables

if TYPE_CHECKING:
    from clipzoo.distributed.world import World
    from clipzoo.initial import Rows
    from clipzoo.training.parts import Dataset, Parts


def main(arguments: list[str]) -> None:
    """Check the command line, then let Hydra run the job, or one job for each point of a sweep."""
    with same_on_all_ranks():
        sys.argv[1:] = hydra_arguments(arguments)
        options, lines = _read_command_line(arguments)
    if options.multirun and (search := trials.search_of(lines)) is not None:
        return trials.run(*search)
    if options.help or options.shell_completion:
        hide_internal_options()
    # Hydra then raises its errors instead of ending the process with its own words.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        job()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(first_line(error)) from None
    if options.multirun:
        from clipzoo.report.pages import write_sweep

        print(write_sweep(lines), flush=True)
        sweep.require_results(lines)


def hydra_arguments(arguments: list[str]) -> list[str]:
    """Return the checked command line as Hydra reads it: options first, shard ranges in quotes.

    Raises:
        ConfigError: an option or override is invalid, for any point of a sweep.
    """
    options, lines = _read_command_line(arguments)
    if options.multirun:
        if launch.read().world_size > 1:
            raise ConfigError("-m starts one process for each point: run it without torchrun")
        if options.cfg:
            raise ConfigError("--cfg shows one configuration: leave out -m (--multirun)")
        os.environ.setdefault("CLIPZOO_SWEEP", sweep.sweep_name(lines))
    for option in ("config_path", "config_name", "experimental_rerun"):
        if getattr(options, option) is not None:
            raise ConfigError(f"--{option.replace('_', '-')} is not an option of clipzoo: choose groups and keys "
                              "with KEY=VALUE, or add your own with --config-dir FOLDER")  # fmt: skip
    if (options.resolve or options.package is not None) and not options.cfg:
        raise ConfigError("--resolve and --package go with --cfg job")
    folders: list[str] = []
    if not (options.version or options.shell_completion):
        read = [overrides.read(line) for line in lines]
        shows = options.cfg or options.help or options.hydra_help or options.info
        search = trials.search_of(lines) if options.multirun and not shows else None
        if search is None:
            for override in read:
                overrides.require_values(override, options.multirun)
        for point in search[1].corner_lines() if search else overrides.covering_points(read):
            plain = compose(point, complete=not shows)
            if (row := plain["row"]) is not None:
                from clipzoo.report.published import require_row

                require_row(row)
            folders = runs_of(plain).hydra_overrides() if options.multirun else []
        if options.multirun and not shows and not search:
            sweep.points(lines)
    own = own_folder()
    return [
        *(argument for argument in arguments if argument not in options.overrides),
        *(() if own is None else ("--config-dir", str(own))),
        *lines,
        *folders,
    ]


def _read_command_line(arguments: list[str]) -> tuple[Namespace, list[str]]:
    """Return Hydra's options, and the overrides in Hydra's grammar."""
    parser = Parser("clipzoo train", add_help=False)
    for option in ("-h/--help", "--hydra-help", "--version", "--resolve", "-r/--run", "-m/--multirun",
                   "-sc/--shell-completion"):  # fmt: skip
        parser.add_argument(*option.split("/"), action="store_true")
    parser.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
    for option in ("-p/--package", "-cp/--config-path", "-cn/--config-name", "--experimental-rerun"):
        parser.add_argument(*option.split("/"))
    parser.add_argument("-i", "--info", nargs="?", const="all", choices=INFORMATION)
    parser.add_argument("overrides", nargs="*")
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        key = unknown[0].lstrip("-").split("=")[0].replace("-", "_")
        raise ConfigError(f"there is no option {unknown[0]}; values are given as {FOREIGN_KEYS.get(key, key)}=VALUE")
    return options, [str(overrides.read(text).input_line) for text in options.overrides]


INFORMATION = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
"""Values of Hydra's option --info."""


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def job(config: DictConfig) -> None:
    try:
        with exit_on_error():
            launch.set_environment()
            train(config)
    except SystemExit as end:
        # The other points of a sweep are still trained; `main` names this one at the end.
        if end.code not in FAILURES or HydraConfig.get().mode is not RunMode.MULTIRUN:
            raise


FAILURES = (1, 2)
"""Exit codes of a run that has failed; it has not been stopped from outside."""


def train(config: DictConfig) -> None:
    """Train the configured run to its end, or report that it is finished."""
    trust = trusted_names(command_line())
    given = with_digests(checked(config, trust))
    # `plain` is written, sent and compared: it holds no passwords and no values of environment variables.
    plain, values = masked(given), with_variables(given)
    runs = runs_of(plain)
    folder = find_run(plain, command_line(), partial(fingerprint, values["data"]))
    if has_ended(folder, plain):
        if launch.read().is_first:
            runs.complete(folder)
        result = record.summary(folder) + length_hint(plain) + evaluation_hint(folder, plain)
        launch.say(result)
        return

    # torch and the encoders' libraries are imported only now: everything above is reported at once.
    from clipzoo.build import build_model, build_parts, found_in_model
    from clipzoo.distributed.launch import described, set_threads
    from clipzoo.distributed.preemption import Preemption, Spares
    from clipzoo.distributed.watchdog import Watchdog
    from clipzoo.distributed.world import World
    from clipzoo.initial import initialise
    from clipzoo.training.loggers.terminal import quiet_libraries
    from clipzoo.training.parts import Parts

    watchdog = Watchdog()
    preemption = Preemption(watchdog)
    quiet_libraries()
    found = found_in_model(values, trust)
    plain, values = filled(plain, found), filled(values, found)
    parts = build_parts(values, trust)
    trainer, dataset, evaluator = parts.trainer, parts.dataset, parts.evaluator
    spares = Spares(trainer.length.global_batch)
    spares.wait_if_spare(trainer.timeout)
    world = World.join(trainer.device, trainer.timeout)
    set_threads(world.device)
    with (
        watchdog.guard(world, trainer.timeout, folder),
        RunLock(folder) as lock,
        runs.kept(lock, world, preemption.request, watchdog.before_exit),
    ):
        with created(folder, world):
            model = build_model(values, parts.head, trust)
            dataset.open(folder, world)
            trainer.check(dataset, plain["seed"], world)
            rows = initialise(model, folder, plain, values, parts, trust, world)
            precision = trainer.choose_precision(folder, world)
            evaluator.open()
            best_metric = of_weights(trainer.saving.best_metric, averaged=parts.averaging is not None)
            evaluator.require(best_metric, trainer.length.global_batch)
        device, warning = described(world, plain["data"].get("workers"))
        world.run_on_first(lambda: begin(lock, plain, given, dataset, rows, f"{precision} on {device}", world))
        if warning:
            launch.say(f"clipzoo: warning: {warning}")
        training = Parts(
            model, parts.objective, dataset, parts.optimizer, trials.at_rungs(evaluator, watchdog), parts.logger,
            plain["seed"], folder, plain, parts.tuning, averaging=parts.averaging,
        )  # fmt: skip
        cost, metrics = trainer.fit(training, world, preemption)
        finish(training, cost, metrics, world)
    world.leave()
    spares.release()


def begin(
    lock: RunLock,
    plain: Mapping[str, Any],
    given: Mapping[str, Any],
    dataset: Dataset,
    rows: Rows,
    hardware: str,
    world: World,
) -> None:
    """Claim the run directory, and say what is trained and how. On the first rank.

    given: see `claim`. hardware: precision, device and loader processes, in words.
    """
    from clipzoo.data.captions import described as described_captions
    from clipzoo.export.open_clip import export_note
    from clipzoo.initial import report_initial_weights

    kept = claim(lock, plain, dataset.fingerprint, given)
    if kept is not None:
        launch.say(f"{lock.folder} continues, with the schedules of the whole length; earlier results: {kept}")
    report_initial_weights(rows, lock.folder)
    launch.say(
        f"{lock.folder}: {number_of(dataset.samples, 'sample')}, {plain['trainer']['global_batch']} per step, "
        f"{number_of(world.size, 'rank')}, {hardware}{export_note(plain)}"
    )
    if (captions := dataset.captions()).pairs:
        figures = captions.figures(plain["trainer"]["global_batch"])
        io.write_json(lock.folder / CAPTIONS, figures)
        launch.say(f"data: {described_captions(figures)}")


def fingerprint(data: Mapping[str, Any], run: Path) -> str | None:
    """Return the fingerprint of the dataset of a `data` node, None without an index; see `stored_fingerprint`."""
    # Imports numpy, and is only called if a run was trained on shards in another place.
    from clipzoo.data.index import stored_fingerprint

    return stored_fingerprint(data, run)


def command_line() -> list[str]:
    """Return the overrides of this job as they were typed: iterating over Hydra's list resolves interpolations."""
    overrides = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    assert isinstance(overrides, list)
    return [str(override) for override in overrides]


def finish(training: Parts, cost: Mapping[str, Any], metrics: Mapping[str, float], world: World) -> None:
    """Write the report and the results of a run that has ended. Collective."""
    from clipzoo.training.inspection import diagnostics

    assert training.folder is not None
    path = training.folder / "evaluation" / "samples.json"
    samples = diagnostics.write_sample_summary(training.objective, path, world=world)
    world.run_on_first(lambda: write_outputs(training, cost, metrics, samples))


def write_outputs(
    training: Parts,
    cost: Mapping[str, Any],
    metrics: Mapping[str, float],
    samples: Mapping[str, Any],
) -> None:
    """Write the report and the results of a run that has ended. samples: summary of the per-sample state.

    results.json comes last: a run directory that has it is finished and complete. Until then, the same command starts
    again after the last checkpoint, with the cached evaluation.
    """
    from clipzoo.report.pages import write_report
    from clipzoo.training.inspection import diagnostics

    folder = training.folder
    assert folder is not None
    diagnostics.write_examples(samples, training.dataset, folder / "evaluation" / "samples")
    experiment = HydraConfig.get().runtime.choices.get("experiment")
    results = record.results(folder, training.config, experiment, command_line(), cost, metrics)
    write_report(folder, results)
    training.logger.report(metrics, sorted((folder / "report").glob("*.png")))
    training.logger.close()
    if any(name.endswith("lora_A") for name in training.model.state_dict()):
        from clipzoo.export.adapters import save_adapters

        save_adapters(folder, folder / "adapters")
    results.write(folder)
    launch.say(record.summary(folder))
