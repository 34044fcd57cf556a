"""Classes of a user's own package, named by configurations in tests."""

from __future__ import annotations

from subprocess import Popen as Popen

from clipzoo.heads.vector import ClipHead


class OwnHead(ClipHead):
    """A head that is not a class of clipzoo."""
