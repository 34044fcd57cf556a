"""Evaluate a run, a checkpoint or a model of another library.

clipzoo evaluate run=runs/demo eval=demo
clipzoo evaluate run=runs/demo/checkpoints/step_00001000.pt eval=demo eval.draws=5
clipzoo evaluate run=runs/demo averaged=true eval=demo                       the averaged weights of a run
clipzoo evaluate run=runs/tuned mix_with=runs/demo mix=[0,0.5,1] eval=demo      WiSE-FT: the weights between two runs
clipzoo evaluate model=ViT-B-32 pretrained=laion2b_s34b_b79k eval=paper
clipzoo evaluate model=ViT-B-32 pretrained=laion2b_s34b_b79k eval=paper eval.prompts=clip --expect      as published?
clipzoo evaluate model=transformers:google/siglip-base-patch16-224 eval=paper
clipzoo evaluate model=hf-hub:OWNER/MODEL eval=demo                          a folder on disk works, too
torchrun --nproc-per-node 8 --no-python clipzoo evaluate run=runs/demo eval=paper
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipzoo import io
from clipzoo.cli.arguments import output_fault
from clipzoo.config.compose import compose
from clipzoo.config.trust import trusted_names
from clipzoo.distributed.launch import SIGNALS, same_on_all_ranks, say
from clipzoo.errors import ConfigError, TrainingError, number_of
from clipzoo.io import folder_name
from clipzoo.io.weights import is_checkpoint, run_of
from clipzoo.runs.directory import config_of, is_finished, run_at
from clipzoo.runs.identity import with_variables
from clipzoo.runs.record import AVERAGE, TASKS, RunRecord, of_average, parsed, results
from clipzoo.runs.remote import local_copy, write_back

if TYPE_CHECKING:
    from clipzoo.distributed.world import World
    from clipzoo.evaluation.suite import Suite
    from clipzoo.loading import LoadedModel

NO_NUMBERS = (
    "--expect: no evaluated dataset has a published number. open_clip's tables have those of model=NAME pretrained=TAG "
    "(published=NAME/TAG for weights from a file); ImageNet's need eval.prompts=clip"
)
MIX_METRICS = ("top1", "mean_per_class", "recall_at_1")
"""Metrics of the table of interpolated weights."""
PLACEHOLDERS = {
    "image_size": 224,
    "interpolation": "bicubic",
    "resize_mode": "shortest",
    "tokenizer": {"_target_": "clipzoo.data.tokenizer.ClipTokenizer", "context_length": 77},
}
"""Encoder settings with which the overrides are checked before the model is loaded."""


def main(arguments: list[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
    else:
        evaluate(["expect=true" if word == "--expect" else word for word in arguments], signals=SIGNALS)


def evaluate(overrides: list[str], signals: Sequence[int] = ()) -> dict[str, float]:
    """Evaluate the model of `run=` or `model=` on the datasets of `eval=`; update its results and its report.

    signals: those that end all ranks with exit code 75; finished datasets are cached, so the same command continues.
    """
    from clipzoo.report.published import expected_numbers, require_row

    # A mistyped key is reported before torch is imported.
    with same_on_all_ranks():
        plain, trust = _composed(overrides, PLACEHOLDERS), trusted_names(overrides)
        given_run = plain["run"]
        local_paths = {key: plain[key] and str(local_copy(plain[key], key)) for key in ("run", "mix_with")}
        plain |= local_paths
        if (plain["run"] is None) == (plain["model"] is None):
            raise ConfigError("give one of run=FOLDER, run=CHECKPOINT and model=NAME")
        if plain["mix_with"] is not None and not plain["mix"]:
            raise ConfigError("mix=[] names no model: give mix=[0,0.25,0.5,0.75,1]")
        if plain["averaged"] and (plain["run"] is None or plain["mix_with"] is not None):
            raise ConfigError("averaged=true needs run= without mix_with=: it is the average of a run's weights")
        if plain["row"] is not None:
            if plain["run"] is not None:
                raise ConfigError(f"row={plain['row']} goes with model=: a run has its own row")
            require_row(plain["row"])
        for key in ("mix_with", "run"):
            if plain[key] is not None:
                config_of(run_at(Path(plain[key]), f"{key}={plain[key]}"))
        name, pretrained = str(plain["run"] or plain["model"]), plain["pretrained"]
        is_named = pretrained or not (plain["run"] or ":" in name or Path(name).exists())
        own_name = f"{name.replace('/', '-')}/{pretrained}" if pretrained else name.removeprefix("open_clip:")
        numbers, source = expected_numbers(plain["published"], own_name, plain["eval"].get("prompts"))
        if plain["mix_with"] is not None and (plain["published"] or plain["expect"]):
            raise ConfigError("published= and --expect compare one model: leave mix_with= out")
        datasets = {(task, name) for task in TASKS for name in plain["eval"].get(task, ())}
        if plain["expect"] and not datasets & {(key.task, key.dataset) for key in numbers}:
            raise ConfigError(NO_NUMBERS)
        if plain["output"] is not None:
            # The evaluation of a run belongs in its directory.
            if plain["output"] != plain["run"] and (fault := output_fault(plain["output"])):
                raise ConfigError(f"output={fault}")
            folder = Path(plain["output"])
        elif plain["run"] is not None:
            path = Path(plain["run"])
            # The results of one checkpoint are not the results of the run.
            folder = run_of(path) / path.stem if is_checkpoint(path) else path
        else:
            parts = [plain["model"], pretrained and Path(pretrained).stem]
            slug = "-".join(part.replace("/", "-").replace(":", "-") for part in parts if part).strip("-.")
            folder = Path("runs") / folder_name(slug, "model")
        if is_finished(folder):
            RunRecord.read(folder)  # damaged results are reported before the evaluation
    from clipzoo.build import build_part
    from clipzoo.distributed.preemption import Preemption
    from clipzoo.distributed.watchdog import Watchdog
    from clipzoo.distributed.world import World
    from clipzoo.evaluation.suite import Suite
    from clipzoo.exports.hub import load
    from clipzoo.exports.open_clip import from_open_clip
    from clipzoo.report.statistics import compare_with_published

    world = World.join(plain["device"], plain["timeout"], key="device")
    watchdog = Watchdog()
    Preemption(watchdog, signals)
    with watchdog.guard(world, plain["timeout"], folder):
        average = plain["averaged"]
        model = from_open_clip(name, pretrained) if is_named else load(name, trust=tuple(trust), average=average)
        resizing = {} if plain["run"] else vars(model.transform)
        plain = _composed(overrides, {**resizing, **model.config["encoder"]}) | local_paths
        stored = str(model.stored_dtype).partition(".")[2]
        plain["precision"] = {"weights": stored, "encoders": plain["eval"]["precision"]}
        say(f"evaluation: weights stored in {stored}, encoders compute in {plain['eval']['precision']}")
        if model.dtype.itemsize == 2:
            model = model.float()  # heads and scores never compute in half precision
        suite = build_part(plain["eval"], trust, Suite)
        suite.open()
        if plain["mix_with"] is not None:
            first = load(plain["mix_with"], trust=tuple(trust))
            metrics = evaluate_mixes(first, model, plain["mix"], suite, folder, world)
        else:
            output = folder / "evaluation"
            output = output / AVERAGE if plain["averaged"] else output
            metrics = suite.run(model.to(world.device), output, world)
            compared = world.run_on_first(lambda: compare_with_published(parsed(metrics), numbers, source, output))
            if plain["averaged"]:
                metrics, compared = of_average(metrics), of_average(compared)
            world.run_on_first(lambda: _write(folder, plain, overrides, metrics, compared))
        if given_run is not None and plain["output"] is None:
            world.run_on_first(lambda: write_back(given_run, "run"))
        if plain["expect"]:
            world.run_on_first(lambda: _require_agreement(compared))
    world.leave()
    return metrics


def _composed(overrides: list[str], encoder: Mapping[str, Any]) -> dict[str, Any]:
    """Compose eval.yaml; its image size, tokenizer and resizing are those of the encoder."""
    node = {key: encoder.get(key, value) for key, value in PLACEHOLDERS.items()}
    return with_variables(compose(overrides, "eval", nodes={"encoder": node}))


def _require_agreement(compared: Mapping[str, Any]) -> None:
    """Raise TrainingError if a published number is outside the interval of the measured one."""
    from clipzoo.report.render import terminal
    from clipzoo.report.sections import agreement_table

    if not compared:
        raise ConfigError(NO_NUMBERS)
    if outside := {key: part for key, part in compared.items() if not part["low"] <= part["value"] <= part["high"]}:
        raise TrainingError(
            f"{number_of(len(outside), 'published number')} of {len(compared)} outside the interval of the measured "
            f"number:\n{terminal(agreement_table(outside))}"
        )


def _write(
    folder: Path, plain: Mapping[str, Any], overrides: list[str], metrics: Mapping[str, float], compared: dict[str, Any]
) -> None:
    """Write the report, then results.json, but not for an unfinished run, which it would mark as finished."""
    from clipzoo.report.pages import write_report
    from clipzoo.report.render import terminal
    from clipzoo.report.sections import agreement_table

    record = None
    if is_finished(folder):
        record = RunRecord.read(folder).evaluated(plain["eval"], parsed(metrics), folder)
    elif not (folder / "config.yaml").exists():
        row = plain["row"] if plain["run"] is None else config_of(run_of(Path(plain["run"])))["row"]
        facts = {"row": row, "seed": plain["eval"]["seed"], "eval": plain["eval"]}
        record = results(folder, facts, None, overrides, {"steps": 0}, metrics)
    record = record and replace(record, published={**record.published, **compared}, precision=plain["precision"])
    io.write_json(folder / "evaluation" / "metrics.json", metrics)
    page = write_report(folder, record)
    if record is not None:
        record.write(folder)
    if compared:
        say(f"{terminal(agreement_table(compared))}\npublished by {next(iter(compared.values()))['source']}")
    say(f"report: {page}")


def evaluate_mixes(
    first: LoadedModel, second: LoadedModel, mixes: Sequence[float], suite: Suite, folder: Path, world: World
) -> dict[str, float]:
    """Evaluate (1 - mix) first + mix second for all mixes; write <folder>/mix. Returns the metrics of the last mix."""
    from clipzoo.loading import interpolate
    from clipzoo.report.render import Cell, markdown, terminal, text_table

    output = folder / "mix"
    results: dict[float, dict[str, float]] = {}
    for mix in mixes:
        results[mix] = suite.run(interpolate(first, second, mix).to(world.device), output / f"{mix:g}", world)

    def write() -> None:
        # A row for each mix; the best value of a metric is bold.
        columns = [str(key) for key in parsed(next(iter(results.values()))) if key.metric in MIX_METRICS]
        best = {column: max(metrics[column] for metrics in results.values()) for column in columns}
        rows: list[list[str | Cell]] = [
            [f"{mix:g}", *(Cell(f"{metrics[key]:.2f}", bold=metrics[key] == best[key]) for key in columns)]
            for mix, metrics in results.items()
        ]
        table = text_table(["mix", *columns], rows, left=1)
        io.write_json(output / "metrics.json", {f"{mix:g}": metrics for mix, metrics in results.items()})
        io.write_whole(output / "mix.md", f"# Weights between two runs\n\n{markdown(table)}\n")
        say(f"{terminal(table)}\n{output / 'mix.md'}")

    world.run_on_first(write)
    return results[mixes[-1]]
