"""What an objective's state says of single samples, on a run's page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path


def sample_pages(run: Path, pictures: Path) -> Iterator[str]:
    """A histogram of each per-sample statistic and the samples at its ends; nothing for an objective without state."""
    path = run / "evaluation" / "samples.json"
    if not path.exists():
        return
    from clipzoo.report.run_page.diagnostics import extreme_samples, sample_histograms

    summary = json.loads(path.read_text())
    yield "## Single samples"
    sample_histograms(summary).savefig(pictures / "samples.png", dpi=130)
    yield "![histograms](report/samples.png)"
    folder = run / "evaluation" / "samples"
    if not (folder / "captions.json").exists():
        return
    for name in summary:
        extreme_samples(summary, folder, name).savefig(pictures / f"samples_{name}.png", dpi=130)
        title = name.replace("_", " ").capitalize()
        yield f"{title}: where it is highest and lowest.\n\n![{name}](report/samples_{name}.png)"
