"""Train a model: compose, check, build, train, evaluate, report. `clipzoo train --help` lists the options."""

from __future__ import annotations

import math
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from clipzoo import io
from clipzoo.cli.arguments import Parser
from clipzoo.config import trust as overrides
from clipzoo.config.compose import checked, compose
from clipzoo.config.groups import CONF, FOREIGN_KEYS, hide_internal_options, own_folder
from clipzoo.config.schema import filled
from clipzoo.config.trust import trusted_names
from clipzoo.distributed import launch
from clipzoo.distributed.launch import exit_on_error, same_on_all_ranks
from clipzoo.errors import ConfigError, first_line, masked, number_of

if TYPE_CHECKING:
    from clipzoo.distributed.preemption import Preemption
    from clipzoo.distributed.watchdog import Watchdog
    from clipzoo.distributed.world import World
    from clipzoo.runs.lock import RunLock
    from clipzoo.runs.remote import RemoteRun
    from clipzoo.runs.search import Search, Space


class CommandLine(NamedTuple):
    """A checked command line of `clipzoo train`.

    options: Hydra's options. lines: overrides in Hydra's grammar. search: None for a run or a plain sweep.
    configurations: that of the run, or those of the fewest points of a sweep with every value of every swept key.
    """

    arguments: Sequence[str]
    options: Namespace
    lines: list[str]
    search: tuple[Search, Space] | None
    configurations: list[dict[str, Any]]

    @property
    def hydra_arguments(self) -> list[str]:
        """The command line as Hydra reads it: options first, shard ranges in quotes."""
        from clipzoo.runs.remote import runs_of

        user_folder = own_folder()
        is_sweep = self.options.multirun and self.configurations
        return [
            *(argument for argument in self.arguments if argument not in self.options.overrides),
            *(() if user_folder is None else ("--config-dir", str(user_folder))),
            *self.lines,
            *(runs_of(self.configurations[-1]).hydra_overrides() if is_sweep else ()),
        ]


def main(arguments: list[str]) -> None:
    """Check the command line and train its run, or search, or let Hydra run one job for each point of a sweep."""
    with same_on_all_ranks():
        line = read_command_line(arguments)
    if line.search is not None:
        from clipzoo.cli.trials import run_search

        return run_search(*line.search)
    # Hydra runs plain sweeps, prints information, and reads its own settings.
    sets_hydra = any(override.lstrip("+~").startswith("hydra") for override in line.lines)
    if not (line.options.multirun or shows(line.options) or sets_hydra):
        experiments = [entry.value() for entry in map(overrides.read, line.lines) if entry.key_or_group == "experiment"]
        experiment = None if not experiments or experiments[-1] is None else str(experiments[-1])
        return train(line.configurations[0], line.lines, experiment, line.options.dry_run)
    if line.options.dry_run:
        raise ConfigError("--dry-run checks a single training: leave out -m, and options and keys of Hydra")
    sys.argv[1:] = line.hydra_arguments
    if line.options.help or line.options.shell_completion:
        hide_internal_options()
    # Hydra then raises its errors instead of ending the process with its own message.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        job()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(first_line(error)) from None
    if line.options.multirun:
        from clipzoo.runs.sweep import require_results

        print(import_module("clipzoo.report.pages").write_sweep(line.lines), flush=True)
        require_results(line.lines)


def read_command_line(arguments: list[str]) -> CommandLine:
    """Parse, compose and check a command line. Raises ConfigError, for any point of a sweep."""
    parser = Parser("clipzoo train", add_help=False)
    for option in ("-h/--help", "--resolve", "-m/--multirun", "-sc/--shell-completion", "--dry-run"):
        parser.add_argument(*option.split("/"), action="store_true")
    parser.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
    parser.add_argument("overrides", nargs="*")
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        key = unknown[0].lstrip("-").split("=")[0].replace("-", "_")
        raise ConfigError(f"there is no option {unknown[0]}; values are given as {FOREIGN_KEYS.get(key, key)}=VALUE")
    lines = [str(overrides.read(text).input_line) for text in options.overrides]
    if options.multirun:
        if launch.read().world_size > 1:
            raise ConfigError("-m starts one process for each point: run it without torchrun")
        if options.cfg:
            raise ConfigError("--cfg shows one configuration: leave out -m (--multirun)")
        from clipzoo.runs.sweep import sweep_name

        os.environ.setdefault("CLIPZOO_SWEEP", sweep_name(lines))
    if options.resolve and not options.cfg:
        raise ConfigError("--resolve goes with --cfg job")
    if options.shell_completion:
        return CommandLine(arguments, options, lines, None, [])
    parsed = [overrides.read(line) for line in lines]
    is_sweep, search = options.multirun and not shows(options), None
    if is_sweep:
        from clipzoo.runs.search import search_of

        search = search_of(lines)
    if search is None:
        for override in parsed:
            overrides.require_values(override, options.multirun)
        # The fewest points with every value of every swept key; one if nothing is swept.
        choices = [values for override in parsed if (values := overrides.alternatives(override)) is not None]
        count = max(map(len, choices), default=1)
        points = [tuple(values[min(index, len(values) - 1)] for values in choices) for index in range(count)]
    else:
        points = search[1].corner_lines()
    configurations = [compose(point, complete=not shows(options)) for point in points]
    for row in {plain["row"] for plain in configurations} - {None}:
        import_module("clipzoo.report.published").require_row(row)
    if is_sweep and search is None:
        from clipzoo.runs.sweep import points as points_of

        points_of(lines)
    return CommandLine(arguments, options, lines, search, configurations)


def shows(options: Namespace) -> bool:
    """Return True if Hydra prints information instead of training."""
    return bool(options.cfg or options.help or options.shell_completion)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def job(config: DictConfig) -> None:
    """Train one point of a sweep."""
    # The overrides as they were typed: iterating over Hydra's list resolves interpolations.
    lines = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    assert isinstance(lines, list)
    typed = [str(line) for line in lines]
    try:
        with exit_on_error():
            launch.set_environment()
            train(checked(config, trusted_names(typed)), typed, HydraConfig.get().runtime.choices.get("experiment"))
    except SystemExit as end:
        # After a failure (1 or 2) the other points of a sweep are still trained; `main` names this one at the end.
        if end.code not in (1, 2) or HydraConfig.get().mode is not RunMode.MULTIRUN:
            raise


def train(config: dict[str, Any], lines: Sequence[str], experiment: str | None, dry_run: bool = False) -> None:
    """Train a run to its end, or report that it is finished.

    config: checked configuration. lines: overrides as typed. experiment: option of this group, or None. dry_run: end
    before the first step, print the plan, and remove a new run directory.

    results.json comes last: a run directory that has it is finished and complete. Until then, the same command resumes
    from the last checkpoint, with the cached evaluation.
    """
    from clipzoo.runs import record
    from clipzoo.runs.directory import CAPTIONS, claim, created, evaluation_hint, find_run, is_finished, with_digests
    from clipzoo.runs.identity import dataset_record, with_variables
    from clipzoo.runs.lock import RunLock
    from clipzoo.runs.remote import runs_of

    began, trust = time.time(), trusted_names(lines)
    full_config = with_digests(config)
    # `plain` is written, sent and compared: it holds no passwords and no values of environment variables.
    plain, values = masked(full_config), with_variables(full_config)
    runs = runs_of(plain)

    def fingerprint(run: Path) -> str | None:
        # Imports numpy, and is only called if a run was trained on shards in another place.
        from clipzoo.data.tables.selection import stored_fingerprint

        # A grown dataset begins with that of the run, or is refused when it is opened.
        grow = values["data"].get("grow")
        return dataset_record(run).get("fingerprint") if grow else stored_fingerprint(values["data"], run)

    folder = find_run(plain, lines, fingerprint)
    if is_finished(folder):
        if launch.read().is_first and not dry_run and (run := runs.run(folder.name)) is not None:
            run.complete()
        launch.say(record.summary(folder) + evaluation_hint(folder, plain))
        return

    # torch and the encoders' libraries are imported only now: everything above is reported at once.
    from clipzoo.build import build_model, build_parts, found_in_model
    from clipzoo.cli.trials import hooks
    from clipzoo.data.captions import described as described_captions
    from clipzoo.distributed.preemption import Preemption, Spares
    from clipzoo.distributed.watchdog import Watchdog
    from clipzoo.distributed.world import World, described, prepare_cublas, set_threads
    from clipzoo.evaluation.suite import Suite
    from clipzoo.exports.open_clip import export_note
    from clipzoo.initial import initialise, report_initial_weights
    from clipzoo.training.diagnostics import summarise_samples, write_samples
    from clipzoo.training.loggers import quiet_libraries
    from clipzoo.training.train import fit

    watchdog = Watchdog()
    preemption = Preemption(watchdog)
    quiet_libraries()
    model_facts = found_in_model(values, trust)
    plain, values = filled(plain, model_facts), filled(values, model_facts)
    parts = replace(build_parts(values, trust), folder=folder, config=plain, began=began)
    settings, dataset, evaluator = parts.settings, parts.dataset, parts.evaluator
    assert isinstance(evaluator, Suite)
    spares = Spares(settings.global_batch)
    spares.wait_if_spare(settings.timeout)
    if settings.deterministic:
        prepare_cublas()
    world = World.join(settings.device, settings.timeout)
    set_threads(world.device)
    with (
        RunLock(folder) as lock,
        watchdog.guard(world, settings.timeout, folder, lock.note_end),
        uploaded(None if dry_run else runs.run(folder.name), lock, world, preemption, watchdog),
        ExitStack() as start,
    ):
        start.enter_context(created(folder, world.is_first, is_kept=not dry_run))
        model = build_model(values, parts.head, trust)
        dataset.open(folder, world)
        dataset.check(parts.seed, settings.global_batch)
        settings.check(dataset.epoch_rows, world)
        if parts.teacher is not None:
            parts.teacher.open(parts, model, trust)
        rows = initialise(model, folder, plain, values, parts, trust, world)
        settings = settings.resolved(folder, world)
        evaluator.open()
        best_metric = settings.checkpoints.best_metric
        if best_metric and parts.averaging is not None:
            best_metric = best_metric.removeprefix(f"{record.AVERAGE}/")
        evaluator.require(best_metric, settings.global_batch)
        if not dry_run:
            start.close()
        device, warning = described(world, plain["data"].get("workers"))

        def begin() -> None:
            if not dry_run:
                claim(lock, plain, dataset.fingerprint, full_config)
            report_initial_weights(rows, folder)
            launch.say(
                f"{folder}: {number_of(dataset.samples, 'sample')}, {settings.global_batch} per step, "
                f"{number_of(world.size, 'rank')}, {settings.precision} on {device}{export_note(plain)}"
            )
            if (captions := dataset.captions()).pairs:
                figures = captions.figures(settings.global_batch)
                io.write_json(folder / CAPTIONS, figures)
                launch.say(f"data: {described_captions(figures)}")

        world.run_on_first(begin)
        if warning:
            launch.say(f"clipzoo: warning: {warning}")
        parts = replace(parts, settings=settings)
        cost, metrics = fit(model, parts, world, preemption, hooks(watchdog, world), dry_run)
        if dry_run:
            plan = import_module("clipzoo.plan.plan")
            gpu = next((name for name in reversed(plan.GPUS) if name in device), "H100")
            words = ["--gpus", str(world.size), "--gpu", gpu, "--samples", str(dataset.samples)]
            words += ["--per-node", str(math.gcd(world.size, 8))] if world.size > 8 else []
            total = settings.total_steps(dataset.samples)
            launch.say(f"{folder}: ready for step {cost['steps'] + 1} of {total:,}; nothing was trained")
            world.run_on_first(lambda: plan.main([*lines, *words]))
        else:
            samples = summarise_samples(parts.objective, world=world)

            def finish() -> None:
                write_samples(samples, dataset, folder / "evaluation")
                results = record.results(folder, plain, experiment, lines, cost, metrics)
                # Imported by name and only now: training does not need the report.
                pages = import_module("clipzoo.report.pages")
                pages.write_report(folder, results)
                parts.logger.report(metrics, sorted((folder / "report").glob("*.png")))
                parts.logger.close()
                if any(name.endswith("lora_A") for name in model.state_dict()):
                    from clipzoo.exports.adapters import save_adapters

                    save_adapters(folder, folder / "adapters")
                card = pages.write_card(folder, results)
                results.write(folder)
                launch.say(card)

            world.run_on_first(finish)
    world.leave()
    spares.release()


@contextmanager
def uploaded(
    run: RemoteRun | None, lock: RunLock, world: World, preemption: Preemption, watchdog: Watchdog
) -> Iterator[None]:
    """Keep the store of a run up to date while the run is trained in the block; no-op for None. Collective.

    Raises ConfigError if another process trains it or the store is unusable, TrainingError after upload_patience (s).
    """
    if run is None:
        yield
        return
    run.on_failure = preemption.request
    needed = world.run_on_first(lambda: run.begin(lock))
    if world.local_rank == 0 and not world.is_first:
        run.fetch(needed)
    world.barrier()
    if world.is_first:
        launch.say(f"{run.store.url} is kept up to date with its local copy {run.folder}")
        watchdog.before_exit(run.finish_at_exit)
    try:
        yield
    except Exception:
        # Several ranks end through the watchdog, which calls `finish_at_exit`.
        if world.size == 1:
            run.finish_at_exit()
        raise
    world.run_on_first(run.finish)
