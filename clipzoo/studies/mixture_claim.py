"""The claim about the agreement of scores with the pointwise mutual information in the mixture world."""

from __future__ import annotations

from clipzoo.studies.framework.study import Claim, Row

CLIP, KME = "CLIP", "KME-CLIP"


def agreement_claim(rows: list[Row], classes: int, width: int) -> Claim:
    """With one training each: no interval, and no statement about other seeds."""
    of = {row["head"]: row for row in rows if (row["classes"], row["width"]) == (classes, width)}
    shown = [
        f"{name} rank correlation {row['rank_correlation']:.3f}, slope {row['slope']:.2f}, error "
        f"{row['mean_error']:.2f} nats"
        for name, row in of.items()
    ]
    return Claim(
        f"(Not in the paper.) KME-CLIP's score follows the PMI more closely than CLIP's: higher rank correlation and "
        f"lower error for r = {classes}, d = {width}, in one training each.",
        "; ".join(shown),
        of[KME]["rank_correlation"] > of[CLIP]["rank_correlation"] and of[KME]["mean_error"] < of[CLIP]["mean_error"],
    )
