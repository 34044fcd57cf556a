"""Execute a tutorial and write its page, its notebook and its pictures.

    python -m scripts.documentation.tutorial docs/tutorials/first_model.py --folder FOLDER

The source is a notebook in jupytext's percent format. Its commands run in FOLDER, which keeps data and runs: a second
execution is quick.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
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
    """Return the notebook of `source` with its outputs. Raises CellExecutionError with the error of a cell."""
    notebook = jupytext.read(source)
    notebook.metadata = {"kernelspec": KERNEL}
    folder.mkdir(parents=True, exist_ok=True)
    # `!clipzoo` is the command of this interpreter and of this checkout.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ["PYTHONPATH"] = str(ROOT)
    client = NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": str(folder)}})
    client.execute()
    for cell in notebook.cells:
        cell.metadata = {}
        for output in cell.get("outputs", []):
            if "text" in output:
                output.text = PROGRESS.sub("", output.text).replace(str(folder.resolve()), ".")
    return notebook


def written(notebook: nbformat.NotebookNode, page: Path) -> str:
    """Return the page: text, code, printed lines, and pictures, which are written to docs/images/tutorials."""
    parts, pictures = [], 0
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(_code(cell.source))
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                pictures += 1
                file = ROOT / "docs" / "images" / "tutorials" / f"{page.stem}_{pictures}.png"
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(base64.b64decode(data["image/png"]))
                alternative = _alternative(cell.source)
                parts.append(f"![{alternative}]({os.path.relpath(file, page.parent)})")
            else:
                text = output.get("text") or data.get("text/plain", "")
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _code(source: str) -> str:
    """Return a bash block if all lines of the cell are `!command`, else a Python block without alternative texts."""
    lines = [line for line in source.splitlines() if not line.startswith("# alt: ")]
    if all(line.startswith("!") for line in lines):
        return "```bash\n" + "\n".join(line[1:] for line in lines) + "\n```"
    return "```python\n" + "\n".join(lines) + "\n```"


def _alternative(source: str) -> str:
    """Return the text of the line `# alt: ...`, which describes the picture of the cell."""
    (text,) = re.findall(r"^# alt: (.*)$", source, re.MULTILINE)
    return text


if __name__ == "__main__":
    main()
