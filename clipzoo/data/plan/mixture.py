"""How the rows of a run are shared among sources."""

from __future__ import annotations

from collections.abc import Sequence


class Mixture:
    """Deals the rows of the whole run to sources in proportion to their integer `shares`.

    Source i's item t is due at (2 t + 1) / (2 share_i); rows take items as they fall due, the lower source first in a
    tie. Exact integers, so that the millionth step is dealt as the first.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.shares = list(shares)

    def row(self, source: int, item: int) -> int:
        """The row of the run that holds item `item` of the source."""
        mine = self.shares[source]
        row = item
        for other, theirs in enumerate(self.shares):
            if other < source:
                row += ((2 * item + 1) * theirs - mine) // (2 * mine) + 1
            elif other > source:
                row += -((mine - (2 * item + 1) * theirs) // (2 * mine))
        return row

    def taken(self, source: int, rows: int) -> int:
        """How many items of the source are among the first `rows` rows."""
        if len(self.shares) == 1:
            return rows
        low, high = 0, rows
        while low < high:
            middle = (low + high) // 2
            if self.row(source, middle) < rows:
                low = middle + 1
            else:
                high = middle
        return low
