"""The same as `clipzoo shards index`."""

import sys

from clipzoo.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main("shards", "index"))
