"""Read and write files: `from clipzoo import io`. The other modules of this folder hold text, weights and stores."""

from clipzoo.io.files import *  # noqa: F403 (its `__all__`)
