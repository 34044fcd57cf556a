"""Execute a tutorial and write its page, its notebook and its pictures.

    python -m scripts.documentation.tutorial docs/tutorials/first_model.py --folder FOLDER

The source is a notebook in jupytext's percent format. Its commands run in FOLDER, which keeps data and runs: a second
execution is quick.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"(!.*\n?)*")
"""A cell with commands of the shell only."""
PROGRESS = re.compile(r"[^\n]*\r(?!\n)")
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="docs/tutorials/NAME.py")
    parser.add_argument("--folder", type=Path, required=True, help="where its commands run")
    options = parser.parse_args()
    notebook = execute(options.source, options.folder)
    page = options.source.with_suffix(".md")
    page.write_text(written(notebook, page))
    nbformat.write(notebook, options.source.with_suffix(".ipynb"))
    print(page)


def execute(source: Path, folder: Path) -> nbformat.NotebookNode:
    """Return the notebook of `source` with its outputs.

    Raises CalledProcessError if a command fails, CellExecutionError with the error of a cell in Python.
    """
    notebook = jupytext.read(source)
    notebook.metadata = {"kernelspec": KERNEL}
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = str(ROOT)
    client = NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": str(folder)}})
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type == "code" and COMMAND.fullmatch(cell.source):
                printed = "".join(_run(line[1:], folder) for line in cell.source.splitlines())
                cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=printed)]
            else:
                client.execute_cell(cell, index)
            cell.metadata = {}
            for output in cell.get("outputs", []):
                if picture := output.get("data", {}).get("image/png"):
                    output.data["image/png"] = base64.b64encode(small(base64.b64decode(picture))).decode()
    return notebook


def small(picture: bytes) -> bytes:
    """Return a PNG of at most 256 colours and 900 pixels a row."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.thumbnail((900, 4000))
    stream = io.BytesIO()
    image.quantize(256).save(stream, "PNG", optimize=True)
    return stream.getvalue()


def _run(command: str, folder: Path) -> str:
    """Run a command of the shell and return what it prints. `clipzoo` runs in this interpreter and checkout."""
    own = f'clipzoo() {{ "{sys.executable}" -m clipzoo.cli "$@"; }}; '
    done = subprocess.run(
        ["bash", "-c", own + command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout)
    return PROGRESS.sub("", done.stdout).replace(f"{folder.resolve()}/", "")


def written(notebook: nbformat.NotebookNode, page: Path) -> str:
    """Return the page: text, code, printed lines, and pictures, which are written to docs/images/tutorials."""
    parts, pictures = [], 0
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(code(cell.source))
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                pictures += 1
                file = ROOT / "docs" / "images" / "tutorials" / f"{page.stem}_{pictures}.png"
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(base64.b64decode(data["image/png"]))
                (alternative,) = re.findall(r"^# alt: (.*)$", cell.source, re.MULTILINE)
                parts.append(f"![{alternative}]({os.path.relpath(file, page.parent)})")
            else:
                text = output.get("text") or data.get("text/plain", "")
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def code(source: str) -> str:
    """Return a bash block if all lines of the cell are `!command`, else a Python block without alternative texts."""
    lines = [line for line in source.splitlines() if not line.startswith("# alt: ")]
    if COMMAND.fullmatch(source):
        return "```bash\n" + "\n".join(line[1:] for line in lines) + "\n```"
    return "```python\n" + "\n".join(lines) + "\n```"


if __name__ == "__main__":
    main()
