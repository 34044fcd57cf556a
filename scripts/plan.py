"""Run `clipzoo plan` from a checkout."""

import sys

from clipzoo.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main("plan"))
