"""The commands of pages, scripts and headers, and the Python blocks of pages, are accepted by their programs."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import open_clip
import pytest

from clipzoo.cli import __main__ as commands, launch, train
from clipzoo.cli.evaluate import PLACEHOLDERS
from clipzoo.config.compose import compose
from clipzoo.plan import plan
from scripts.documentation.docstrings import listed
from tests.support.mistakes import parser_of
from tests.support.paths import ROOT
from tests.support.shards import picture

OWN_TESTS = {ROOT / "docs" / "how_to" / "add_a_head.md", ROOT / "docs" / "how_to" / "your_own.md"}
"""Pages whose blocks tests/heads/test_add_a_head.py and tests/test_pages.py run."""
PAGES = [ROOT / "README.md", *sorted(set((ROOT / "docs").rglob("*.md")) - OWN_TESTS)]
SOURCES = [
    path
    for pattern in ("slurm/*", "scripts/*.py", "conf/**/*.yaml", "clipzoo/**/*.py")
    for path in sorted(ROOT.glob(pattern))
]
"""Scripts, and files whose headers show commands."""
OWN_FOLDER = "--config-dir "
CODE = re.compile(r"^```bash\n(.*?)^```|^ {4}(.*?)$", re.M | re.S)
PROGRAM = r"(?:python (?:train\.py|scripts/\w+\.py)|torchrun(?= --)|sbatch|clipzoo) "
COMMAND = re.compile(rf"^{PROGRAM}[^#\n]*", re.M)
CELL = re.compile(rf"(?<=\| `){PROGRAM}[^`]*=[^`]*(?=`)")
"""A command with settings in a table."""
SUBCOMMANDS = {"train": "train", "eval": "evaluate", "sweep": "launch", "search": "launch"}
"""Subcommand of train.py and of each SLURM file."""


def documented() -> list[str]:
    """Commands of all pages and headers, without comments, each once; not those with files of a page, OWN_FOLDER."""
    texts = {page: page.read_text() for page in PAGES}
    code = ["".join(parts) for text in texts.values() for parts in CODE.findall(text)]
    # The cells of a generated page are experiments, which tests/config composes.
    code += [cell for page, text in texts.items() if page.name != "reproduce.md" for cell in CELL.findall(text)]
    # The lines of a header, without "#"; a meaning stands two spaces behind the command.
    for path in SOURCES:
        lines = re.sub(r"^#? +", "", path.read_text(), flags=re.M).replace("\\\n", "").splitlines()
        code += [line.partition("  ")[0].removesuffix(" &&") for line in lines]
    lines = dict.fromkeys(line.strip() for lines in code for line in COMMAND.findall(lines))
    return [line for line in lines if OWN_FOLDER not in line]


def subcommand(command: str) -> list[str]:
    """Words of `clipzoo`'s command line that stand for the command; the placeholder ... is left out or a shard.

    Words that the shell computes, and what follows a pipe, are left out.
    """
    command = re.sub(r"\$\([^)]*\)|2>&1|\|.*", "", command)
    words = [word.replace("=...", "=folder/0.tar") for word in shlex.split(command) if word != "..."]
    if "clipzoo" in words:
        return words[words.index("clipzoo") + 1 :]
    place, script = next((place, Path(word)) for place, word in enumerate(words) if word.endswith((".py", ".sbatch")))
    if script.stem not in SUBCOMMANDS:
        return []
    return [SUBCOMMANDS[script.stem], *words[place + 1 :]]


@pytest.mark.medium
@pytest.mark.parametrize("command", documented())
def test_a_documented_command_is_accepted(command, monkeypatch):
    monkeypatch.setenv("TOKEN", "secret")
    words = subcommand(command)
    if not words:
        assert (ROOT / shlex.split(command)[1]).exists()
    elif words[0] == "train":
        train.read_command_line(words[1:])
    elif words[0] == "evaluate":
        compose([word for word in words[1:] if word != "--expect"], "eval", nodes={"encoder": PLACEHOLDERS})
    elif words[0] == "plan":
        compose([*parser_of(plan, []).parse_intermixed_args(words[1:]).overrides, "data.shards=none.tar"])
    elif words[0] in ("--help", "--version"):
        with pytest.raises(SystemExit, match="^0$"):
            commands._parser().parse_args(words)
    elif words[0] == "launch":
        options = launch._options(words[1:])
        if options.to == "slurm":
            launch.batch_script(options)
        elif options.to:
            launch.recipe(options)
        else:
            launch._checked_array(options.overrides, options.at_once)
    else:
        commands._parser(words[0]).parse_args(words)


@pytest.mark.medium
def test_the_command_for_an_objective_of_ones_own_finds_the_files_of_its_page(tmp_path):
    page = (ROOT / "docs" / "how_to" / "add_an_objective.md").read_text()
    for path, text in re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (line,) = (line for line in COMMAND.findall(page.replace("\n    clipzoo", "\nclipzoo")) if OWN_FOLDER in line)
    command = [sys.executable, "-m", "clipzoo.cli", *shlex.split(line)[1:], "--cfg", "job"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "_target_: focal.Focal" in shown.stdout


@pytest.mark.medium
def test_the_readmes_library_blocks_run_on_a_trained_model(undisturbed, tmp_path, monkeypatch, capsys):
    for name in ("demo", "vit_b16"):
        shutil.copytree(undisturbed / "run", tmp_path / "runs" / name)
    (tmp_path / "picture.jpg").write_bytes(picture(0, (40, 36), "JPEG"))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "blocks.py"
    script.write_text("\n".join(block for block in blocks if "clipzoo.load" in block))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script))
    assert "tensor([[" in capsys.readouterr().out
    assert open_clip.create_model(f"local-dir:{tmp_path / 'exported'}").logit_scale.item() > 0


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["concepts/one_batch", "concepts/epochs", "how_to/add_an_objective"])
def test_the_python_blocks_of_a_page_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for number, block in enumerate(blocks(ROOT / "docs" / f"{name}.md", "python")):
        named = re.match(r"# (\w+\.py)\n", block)
        script = tmp_path / (named[1] if named else f"block_{number}.py")
        script.write_text(block)
        runpy.run_path(str(script))


TYPED = [
    pytest.param(*session.split("\n", 1), id=session.split("\n", 1)[0])
    for block in blocks(ROOT / "docs" / "reference" / "messages.md", "console")
    for session in block.strip().split("\n\n")
]
"""Command and printed message of every session on the page of messages."""


@pytest.mark.medium
@pytest.mark.parametrize(("command", "message"), TYPED)
def test_a_documented_mistake_prints_the_documented_message(command, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", shlex.split(command.removeprefix("$ ")))
    with pytest.raises(SystemExit, match="^2$"):
        commands.main()
    assert capsys.readouterr().err.strip() == message


def test_arguments_of_a_docstring_become_a_list():
    text = "Train a model.\n\nbatch: of a step,\nover all ranks. steps: their number.\nseed: of all numbers."
    assert listed(text).splitlines()[2:] == [
        "- `batch`: of a step,", "    over all ranks. steps: their number.", "- `seed`: of all numbers."
    ]  # fmt: skip


def test_no_folder_of_the_documentation_has_more_than_sixteen_files():
    folders = [ROOT / "docs", *(path for path in (ROOT / "docs").rglob("*") if path.is_dir())]
    assert [folder for folder in folders if sum(path.is_file() for path in folder.iterdir()) > 16] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_the_pages_outside_the_site_name_files(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.slow
def test_the_site_needs_no_network_and_all_pictures_have_alternative_texts(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", ".mkdocs.yml", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?([^\"\s>]+)", text)
        loaded += re.findall(r"<link\b(?=[^>]*stylesheet)[^>]*\bhref=\"?([^\"\s>]+)", text)
        assert not [place for place in loaded if place.startswith(("http", "//"))], page
        assert not re.search(r"<img\b(?![^>]*\balt=\"[^\"]+)", text), page


def test_the_files_of_the_five_ways_exist_and_are_few():
    page = (ROOT / "docs" / "architecture.md").read_text()
    ways = page[page.index("## Follow one") : page.index("## Invariants")].split("**A command to the loss**")[1]
    most = (25, 12, 10, 20, 12)
    parts = re.split(r"^\*\*[A-Z][^*]+\*\*", ways, flags=re.MULTILINE)
    for part, count in zip(parts, most, strict=True):
        files = set(re.findall(r"`([\w/]+\.py)`", part))
        assert 5 < len(files) <= count and not [file for file in files if not (ROOT / "clipzoo" / file).exists()]
