"""Draw all figures of the documentation: python -m scripts.documentation.figures [heads objectives ...]"""

from __future__ import annotations

import sys
from importlib import import_module

GROUPS = ("heads", "objectives", "diagrams", "measurements")


def main() -> None:
    for group in sys.argv[1:] or GROUPS:
        import_module(f"scripts.documentation.{group}").draw()


if __name__ == "__main__":
    main()
