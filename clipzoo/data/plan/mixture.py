"""Assignment of the rows of a run to its sources."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial


class Mixture:
    """Assigns every row of the run to one of the sources, in proportion to their integer `shares`.

    Item t of source i is due at (2 t + 1) / (2 share_i). Rows take items in the order in which they are due; ties go
    to the source that comes first. The arithmetic is exact, so the millionth step is assigned like the first.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.shares = list(shares)

    def row(self, source: int, item: int) -> int:
        """Return the row of the run that holds item `item` of the source."""
        share = self.shares[source]
        row = item
        for other, other_share in enumerate(self.shares):
            if other < source:
                row += ((2 * item + 1) * other_share - share) // (2 * share) + 1
            elif other > source:
                row += -((share - (2 * item + 1) * other_share) // (2 * share))
        return row

    def count(self, source: int, rows: int) -> int:
        """Return how many items of the source are among the first `rows` rows."""
        if len(self.shares) == 1:
            return rows
        return bisect_left(range(rows), rows, key=partial(self.row, source))
