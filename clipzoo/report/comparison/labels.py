"""Short labels of runs that are compared."""

from __future__ import annotations

import re
from collections.abc import Sequence


def distinct(names: Sequence[str]) -> list[str]:
    """Return what tells the names of runs apart: of "a+head-clip-1a2b3c4d" and "a+head-kme-5e6f7a8b" the heads.

    The digest is left out, and so is every override that all names have. Names that are alike but for their digests,
    and names without one, stay as they are.
    """
    matches = [re.fullmatch(r"(.+)-[0-9a-f]{8}", name) for name in names]
    parts = [match[1].split("+") for match in matches if match]
    if len(parts) < len(names):
        return list(names)
    common = set(parts[0]).intersection(*parts[1:])
    labels = ["+".join(part for part in own if part not in common) or "+".join(own) for own in parts]
    return labels if len(set(labels)) == len(names) > 1 else list(names)
