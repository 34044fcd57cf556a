"""Plan a training on hardware you do not have at hand: memory, traffic, time of a step, setting to choose.

clipzoo plan encoder=vit_b16 head=clip trainer.global_batch=16384 --gpus 64
clipzoo plan experiment=kme/cc12m_kme --gpus 8 --gpu A100 --samples 10000000
clipzoo plan encoder=vit_b16 head=clip trainer.global_batch=4096 --gpus 32 --per-node 4 --memory 96 --between 25

Takes the overrides of a training. Parameters, operations, activations and bytes are counted without weights, data or
GPUs; times are predictions: counts divided by the GPU's data sheet and the share of its peak that a training reaches.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Annotated

from clipzoo.cli.arguments import Parser, number_in, refuse
from clipzoo.config.compose import compose
from clipzoo.config.schema import filled
from clipzoo.config.trust import trusted_names
from clipzoo.config.vocabulary import Machines, Range, Samples
from clipzoo.errors import ConfigError, number_of
from clipzoo.plan.cluster import GPUS, Cluster, configured

SAMPLES = 12_000_000
"""Size of the dataset unless --samples gives it: that of CC12M."""
Figure = Annotated[float, Range(at_least=1e-3, at_most=1e6)]
"""A number of a data sheet, in GB, GB/s or TFLOP/s."""
SHOWN = 8
"""Settings in the table."""


def main(arguments: list[str]) -> None:
    number, size = number_in(Figure), number_in(Machines)
    parser = Parser("clipzoo plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gpus", type=size, default=8, help="number of GPUs, one rank each (default: %(default)s)")
    add("--per-node", type=size, default=8, help="GPUs of a node (default: %(default)s)")
    add("--gpu", choices=GPUS, default="H100", help="data sheet to use (default: %(default)s)")
    add("--memory", type=number, help="GB of a GPU, instead of the data sheet's")
    add("--peak", type=number, help="dense bf16 TFLOP/s of a GPU; TF32 is half of it")
    add("--within", type=number, help="GB/s that a GPU receives within its node")
    add("--between", type=number, default=50.0, help="GB/s that a GPU receives from other nodes (default: %(default)s)")
    share = number_in(Annotated[float, Range(above=0, at_most=1)])
    add("--reached", type=share, default=0.4, help="reached share of the peak (default: %(default)s)")
    add("--samples", type=number_in(Samples), default=SAMPLES, help="samples of the dataset (default: %(default)s)")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of train")
    options = parser.parse_intermixed_args(arguments)
    data = [] if any(line.startswith("data") for line in options.overrides) else ["data.shards=none.tar"]
    plain = compose([*options.overrides, *data])
    trust = trusted_names(options.overrides)
    if options.gpus <= options.per_node:
        refuse(options, ("--per-node", "--between"), f"is for several nodes, and one has all {options.gpus} GPUs")
    elif options.gpus % options.per_node:
        raise ConfigError(f"--gpus {options.gpus} cannot be divided into nodes of --per-node {options.per_node}")
    if options.per_node == 1:
        refuse(options, ("--within",), "is for nodes of several GPUs, not for --per-node 1")
    facts = [("memory", options.memory, 1e9), ("within_node", options.within, 1e9)]
    facts += [("bf16", options.peak, 1e12), ("tf32", options.peak, 5e11)]
    gpu = replace(GPUS[options.gpu], **{name: value * unit for name, value, unit in facts if value})
    cluster = Cluster(gpu, options.gpus, options.per_node, options.between * 1e9, options.reached)
    if (batch := plain["trainer"]["global_batch"]) % cluster.gpus:
        raise ConfigError(f"trainer.global_batch={batch} cannot be divided among {cluster.gpus} GPUs")

    # torch is imported only now: a mistyped key is reported at once.
    from clipzoo.build import found_in_model
    from clipzoo.plan.counts import count, recomputation
    from clipzoo.plan.prediction import predict, predictions, shape_of
    from clipzoo.training.loggers import quiet_libraries
    from clipzoo.training.settings import Length

    quiet_libraries()
    plain = filled(plain, found_in_model(plain, trust))
    counts = count(plain, options.samples, trust)
    shape = shape_of(plain, counts, cluster)
    switches = recomputation(plain)
    recomputed = any(switches.values())
    as_configured = predict(plain, counts, cluster, configured(plain, cluster, shape.local, recomputed))
    best, *others = predictions(plain, counts, cluster)
    print(
        f"{counts.encoder + counts.others:,} parameters, {counts.step_flops / 1e9:.0f} GFLOP a pair; {cluster.gpus} "
        f"{options.gpu}, {number_of(cluster.nodes, 'node')}; {shape.local} of {number_of(shape.batch, 'pair')} a GPU"
    )
    print(f"\nas configured: {as_configured.setting.name(shape.ranks, shape.local)}")
    memory, transfers = as_configured.memory, as_configured.transfers
    parts = ", ".join(f"{name} {_gigabytes(size)}" for name, size in memory._asdict().items() if size >= 5e6)
    received = ", ".join(f"{item.cause} {_gigabytes(item.received)}" for item in transfers)
    seconds = ", ".join(
        f"{name} {_milliseconds(value)}" for name, value in as_configured.seconds.items() if value > 5e-5
    )
    room = "fits" if as_configured.fits(cluster) else "does not fit"
    print(f"memory a GPU, GB: {_gigabytes(memory.total)} of {cluster.gpu.memory / 1e9:g}, {room}: {parts}")
    print(f"received a GPU and step, GB: {_gigabytes(as_configured.received)}{': ' if received else ''}{received}")
    print(f"predicted step, ms: {_milliseconds(as_configured.step)}: {seconds}")
    trainer = plain["trainer"]
    steps = Length(trainer["global_batch"], trainer["epochs"], trainer["steps"]).total_steps(options.samples)
    hours, price = cluster.gpus * as_configured.step * steps / 3600, trainer["hourly_price"]
    length = f"{number_of(steps, 'step')} in {hours / cluster.gpus:,.1f} h, {hours:,.1f} GPU-hours"
    cost = "" if price is None else f", price {price * hours:,.2f}"
    print(f"predicted training: {length}{cost}, without evaluations and stops")
    print(
        "\nSettings that no other one beats in both memory and time (the Pareto frontier), and the largest micro-batch "
        "that fits for each way to share the weights.\n"
        f"All micro-batches are predicted at {cluster.reached:g} of the peak; on a GPU small ones reach less: prefer "
        "the larger of two with equal times.\n"
    )
    print("| setting | memory, GB | received, GB | step, ms | |\n| --- | ---: | ---: | ---: | --- |")
    for item in [best, *others][:SHOWN]:
        sizes = f"{_gigabytes(item.memory.total)} | {_gigabytes(item.received)} | {_milliseconds(item.step)}"
        fit = "" if item.fits(cluster) else "does not fit"
        print(f"| {item.setting.name(shape.ranks, shape.local)} | {sizes} | {fit} |")
    if not best.fits(cluster):
        print("\nno setting fits: use more GPUs, a smaller trainer.global_batch, or a smaller model")
        return
    print(f"\nchoose: {' '.join(best.setting.overrides(shape.ranks, shape.local, switches, recomputed))}")


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2g}" if size < 1e9 else f"{size / 1e9:.1f}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2g}" if seconds < 0.01 else f"{1000 * seconds:.0f}"
