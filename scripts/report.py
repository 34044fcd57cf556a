"""Write a run's report: python scripts/report.py RUN"""

from __future__ import annotations

import sys
from pathlib import Path

from clipzoo.errors import ConfigError
from clipzoo.report.run import write_report


def main() -> None:
    if len(sys.argv) != 2:
        raise ConfigError("give the folder of a run: python scripts/report.py runs/demo")
    run = Path(sys.argv[1])
    if not (run / "metrics.jsonl").exists() and not (run / "results.json").exists():
        raise ConfigError(f"{run} is no run: it has neither metrics.jsonl nor results.json")
    print(write_report(run))


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        print(f"clipzoo: {error}", file=sys.stderr)
        sys.exit(2)
