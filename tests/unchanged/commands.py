"""What the commands of a checkout print and write: listing, plans, pages over stored runs, exports, exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.unchanged import processes, results
from tests.unchanged.cases import BASE, EVALUATED, Case
from tests.unchanged.changed import translated, translated_configuration
from tests.unchanged.checkout import Checkout, error_message

PARTS = ("listing", "plan", "lines", "pages", "exports")
SECONDS = 600
"""Longest run of one of the command lines."""
PLANS = {
    "one_gpu": "encoder=vit_b16 head=clip trainer.global_batch=256 --gpus 1",
    "one_node": "encoder=vit_b16 head=clip trainer.global_batch=4096 --gpus 8 --gpu A100",
    "eight_nodes": "encoder=vit_b16 head=clip trainer.global_batch=16384 --gpus 64",
    "point_sets": "experiment=kme/cc12m_kme --gpus 8 --gpu A100 --samples 10000000",
    "slow_network": (
        "encoder=vit_b16 head=wpse trainer.global_batch=4096 --gpus 32 --per-node 4 --memory 96 --between 25"
    ),
    "small_memory": (
        "encoder=vit_b32 head=cosine objective=nuclr trainer.global_batch=1024 trainer.parallel=fsdp --gpus 16 "
        "--memory 16 --peak 100 --within 50 --reached 0.3"
    ),
}
"""Name -> arguments of `clipzoo plan`: six clusters."""
EXPORTED = {
    "clip": "head=clip",
    "wpse": "head=wpse head.embed_width=16",
    "kme": "head=kme",
    "nuclr": "head=cosine objective=nuclr",
}
"""Name -> the overrides of a model that is exported to every format."""
FORMATS = ("open_clip", "transformers", "hub", "torch", "onnx")
SWEPT = (*BASE, *EVALUATED, "trainer.precision=float32", "head.embed_width=16", "trainer.steps=4")
MADE = {
    "sweep": (*SWEPT, "-m", "head=clip,wpse", "seed=0,1"),
    "search_grid": (*SWEPT, "-m", "head.temperature=0.05,0.1", "optim.schedule.peak=1e-3,1e-2", "search.sampler=grid",
                    "search.maximize=zero_shot/*/top1", "search.minimize=loss"),
    "search_tpe": (*SWEPT, "-m", "head.temperature=tag(log,interval(0.03,0.3))", "search.sampler=tpe",
                   "search.trials=4", "search.startup=2", "search.minimize=loss"),
    "search_pruned": (*SWEPT, "-m", "head.temperature=0.05,0.1,0.2,0.4", "search.sampler=grid", "search.rungs=[0.5]",
                      "search.keep=0.5", "search.maximize=zero_shot/colours/top1"),
}  # fmt: skip
"""Name -> arguments of `clipzoo train` for a sweep or a search, whose page is recorded."""
LABS = {
    "lab": {"methods": ["CLIP", "CLOOB"], "comparisons": [("mixed", "vit"), ("one", "vit")], "claims": [7, 8]},
    "lab_scaling": {"methods": ["CLIP"], "comparisons": [("mixed", "vit")], "claims": []},
}


def cases(part: str, checkout: Checkout, stored: Path | None) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Key and function of every case of a part. stored: the folder of stored.py."""
    if part == "listing":
        yield "listing/keys", partial(listing, checkout)
    elif part == "plan":
        for name, arguments in PLANS.items():
            yield f"plan/{name}", partial(printed, checkout, f"plan/{name}", "plan", *arguments.split())
    elif part == "exports":
        for name, overrides in EXPORTED.items():
            yield f"exports/{name}", partial(exports, checkout, Case(f"exports/{name}", (*BASE, *overrides.split())))
    elif part == "lines":
        assert stored is not None
        yield "lines/all", partial(lines, checkout, stored)
    else:
        assert stored is not None
        yield from _page_cases(checkout, stored)


def printed(checkout: Checkout, key: str, name: str, *arguments: str) -> dict[str, Any]:
    """Exit code and output of a command."""
    program = checkout.command(name, *arguments, key=key)
    return {"exit": program.wait(), "output": program.output.splitlines()}


def listing(checkout: Checkout) -> dict[str, list[str]]:
    """Type and default of every key of `clipzoo config --markdown`, once for each class; the options of every group."""
    rows: dict[str, list[str]] = {}
    for line in printed(checkout, "listing", "config", "--markdown")["output"]:
        key, *cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] or [""]
        if key.startswith("`"):
            rows.setdefault(key.strip("`"), []).append(" | ".join(cells[:2]))
    return {key: sorted(values) for key, values in rows.items()}


def exports(checkout: Checkout, case: Case) -> dict[str, Any]:
    """A trained model in every format: the files, or the message for a model that the format cannot hold."""
    checkout.remove(case)
    training = checkout.train(case)
    (run,) = checkout.runs(case)
    record: dict[str, Any] = {"exit": training["exit"]}
    for name in FORMATS:
        output = checkout.work / "exported" / case.key / name
        shutil.rmtree(output, ignore_errors=True)
        program = checkout.command("export", str(run), "--to", name, "--output", str(output), key=f"{case.key}/{name}")
        code = program.wait()
        record[name] = {"exit": code}
        if code == [0]:
            record[name]["files"] = processes.call(
                checkout.path, exported_files, str(output), answer=checkout.work / f"answer.{os.getpid()}.json"
            )
        else:
            record[name]["message"] = error_message(program.output)
    checkout.remove(case)
    return record


def exported_files(folder: str) -> dict[str, Any]:
    """The files of an export: text, digests of tensors, and outputs of graphs in place of their code."""
    import onnxruntime
    import torch
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            found[name] = {key: results.tensor_digest(value) for key, value in load_file(path).items()}
        elif path.suffix == ".pt2":
            program = torch.export.load(path)
            inputs = [_input(list(value.shape), "int" in str(value.dtype), str(value.dtype).removeprefix("torch."))
                      for value in program.example_inputs[0]]  # fmt: skip
            found[name] = [results.tensor_digest(value) for value in program.module()(*inputs)]
        elif path.suffix == ".onnx":
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            inputs = {}
            for entry in session.get_inputs():
                shape = [size if isinstance(size, int) else 3 for size in entry.shape]
                kind = {"tensor(float)": "float32", "tensor(double)": "float64", "tensor(uint8)": "uint8"}.get(
                    entry.type, "int64"
                )
                inputs[entry.name] = _input(shape, "int" in kind, kind).numpy()
            names = [entry.name for entry in session.get_outputs()]
            outputs = session.run(None, inputs)
            found[name] = {
                name: results.tensor_digest(torch.from_numpy(value)) for name, value in zip(names, outputs, strict=True)
            }
        elif path.suffix in results.TEXTS and path.stat().st_size < 100_000:
            found[name] = results.page(path)
        elif path.suffix not in (".py", ".data"):
            found[name] = results.file_digest(path)
    return found


def _input(shape: list[int], whole: bool, kind: str) -> Any:
    """The same numbers in every recording."""
    import torch

    values = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (values * 200 if whole else values).to(getattr(torch, kind))


def _page_cases(checkout: Checkout, stored: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Pages of one or more stored runs, and of sweeps, searches and labs that the checkout makes."""
    names = sorted(path.name for path in (stored / "runs").iterdir())
    for name in names:
        yield f"pages/run_{name}", partial(page, checkout, stored, f"run_{name}", ("report", f"FOLDER/{name}"))
    tables = [argument for table in (stored / "tables").read_text().split() for argument in ("--table", table)]
    seeds = [f"FOLDER/{name}" for name in names if name.startswith("seed")]
    over: dict[str, tuple[str, ...]] = {
        "report": ("report", "FOLDER"),
        "report_tables": ("report", "FOLDER", *tables, "--note", "A note."),
        "compare": ("compare", "FOLDER"),
        "compare_seeds": ("compare", *seeds, "--note", "Three seeds of two heads."),
        "compare_two": ("compare", *seeds[:2]),
        "compare_scaling": ("compare", "FOLDER", "--scaling", "compute", "samples", "optim.schedule.peak"),
    }
    for name, arguments in over.items():
        yield f"pages/{name}", partial(page, checkout, stored, name, arguments)
    for name, overrides in MADE.items():
        yield f"pages/{name}", partial(made, checkout, name, ("train", *overrides, f"runs=made/{name}"))
    for name in LABS:
        yield f"pages/{name}", partial(lab, checkout, name)


def page(checkout: Checkout, stored: Path, name: str, arguments: tuple[str, ...]) -> dict[str, Any]:
    """The tables and pages that a command writes over a copy of the stored runs."""
    folder = checkout.work / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    copy_runs(checkout, stored / "runs", folder)
    before = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    command, *rest = (argument.replace("FOLDER", "pages") for argument in arguments)
    program = checkout.command(command, *rest, key=f"pages/{name}")
    record: dict[str, Any] = {"exit": program.wait()}
    if record["exit"] != [0]:
        record["message"] = error_message(program.output)
    record["pages"] = results.pages(folder, before, in_runs=True)
    return record


def copy_runs(checkout: Checkout, runs: Path, folder: Path) -> None:
    """Copy the stored runs; their configurations get the checkout's names of keys and classes."""
    shutil.copytree(runs, folder, copy_function=shutil.copyfile)
    targets = {}
    for option in (checkout.path / "conf").rglob("*.yaml"):
        for target in re.findall(r"_target_: (clipzoo\S+)", option.read_text()):
            targets[target.rpartition(".")[2]] = target
    for path in folder.rglob("config.yaml"):
        plain = translated_configuration(yaml.safe_load(path.read_text()), checkout.keys, targets)
        path.write_text(yaml.safe_dump(plain, sort_keys=False))


def made(checkout: Checkout, name: str, arguments: tuple[str, ...]) -> dict[str, Any]:
    """The tables and pages of a sweep, search or lab, which the command makes itself."""
    folder = checkout.work / "made" / name
    shutil.rmtree(folder, ignore_errors=True)
    command, *rest = arguments
    program = checkout.command(command, *rest, key=f"made/{name}")
    record: dict[str, Any] = {"exit": program.wait(), "pages": {}}
    for path, content in results.pages(folder).items():
        record["pages"][path] = results.without_timings(content)
    if record["exit"] != [0]:
        record["message"] = error_message(program.output)
    shutil.rmtree(folder, ignore_errors=True)
    return record


def lab(checkout: Checkout, name: str) -> dict[str, Any]:
    """The page of a lab of the checkout's own conf/lab with few and short trainings."""
    chosen = LABS[name]
    option = "scaling" if name == "lab_scaling" else "default"
    content = yaml.safe_load((checkout.path / "conf" / "lab" / f"{option}.yaml").read_text())
    content |= {"seeds": 2, "evaluations": 2, "search": {"trials": 2, "rungs": [], "keep": 0.5, "seed": 0}}
    content["methods"] = {method: content["methods"][method] for method in chosen["methods"]}
    content["comparisons"] = [{"world": world, "tower": tower} for world, tower in chosen["comparisons"]]
    content["claims"] = [content["claims"][number] for number in chosen["claims"]]
    for world in content["worlds"].values():
        world["train"] = 1000
    content["training"] = [line for line in content["training"] if not line.startswith("trainer.steps")]
    if "scales" in content:
        content["scales"] = {f"{steps} steps": [f"trainer.steps={steps}"] for steps in (4, 6, 8, 12, 16, 24)}
        content["ranges"] = ["optim.schedule.peak=0.001,0.003"]
    else:
        content["training"].append("trainer.steps=12")
        content["ranges"] = ["optim.schedule.peak=tag(log,interval(5e-4,6e-3))", "optim.schedule.warmup_steps=2,4"]
    path = checkout.work / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return made(checkout, name, ("lab", str(path), "--output", f"made/{name}"))


def lines(checkout: Checkout, stored: Path) -> dict[str, Any]:
    """Exit code of each stored command line, and its first message for the reader."""
    folder = checkout.work / "lines"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(stored / "files", folder, symlinks=True)
    given = json.loads((stored / "lines.json").read_text())
    commands = [[translated(word.replace("FOLDER", str(folder)), checkout.keys) for word in line] for line in given]
    outcomes = processes.call(
        checkout.path, run_lines, str(checkout.path), commands, str(folder),
        answer=checkout.work / f"answer.{os.getpid()}.json",
    )  # fmt: skip
    return {f"{number}: {' '.join(line)}"[:400]: outcomes[number] for number, line in enumerate(given)}


def run_lines(checkout: str, commands: list[list[str]], folder: str) -> list[dict[str, Any]]:
    """Run each command line in a fork of this process, which has imported the checkout."""
    import clipzoo

    for name in ("load", "train", "export"):
        getattr(clipzoo, name)
    main = processes.command(checkout)
    os.chdir(folder)
    found = []
    for number, arguments in enumerate(commands):
        log = Path(folder) / f"line_{number}.log"
        pid = os.fork()
        if not pid:
            _run_line(main, arguments, log)
        _, status = os.waitpid(pid, 0)
        messages = error_message(log.read_text(errors="replace")).replace(folder, "FOLDER")
        found.append({"exit": os.waitstatus_to_exitcode(status), "message": messages[:400]})
    return found


def _run_line(main: Callable[[], int], arguments: list[str], log: Path) -> None:
    """Run a command line and end the process with its exit code; SIGALRM ends it after SECONDS."""
    import signal

    signal.alarm(SECONDS)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code: Any = 1
    try:
        sys.argv = ["clipzoo", *arguments]
        code = main()
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
