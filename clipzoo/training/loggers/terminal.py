"""Log messages on the terminal."""

from __future__ import annotations

import logging
import warnings

from clipzoo.distributed import launch
from clipzoo.errors import masked


class MaskingFormatter(logging.Formatter):
    """Masks the passwords of URLs in log messages."""

    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))


def quiet_libraries() -> None:
    """Show messages of this package on the terminal, and only warnings of other libraries."""
    rank = launch.read().rank
    handler = logging.StreamHandler()
    handler.setFormatter(MaskingFormatter("%(levelname)s %(message)s" if rank == 0 else f"rank {rank}: %(message)s"))
    logging.basicConfig(force=True, handlers=[handler])
    # torch's own deprecations, of names that the oldest supported torch still needs.
    warnings.filterwarnings("ignore", message=".* is deprecated", category=FutureWarning)
    logging.getLogger("clipzoo").setLevel(logging.INFO if rank == 0 else logging.ERROR)
