"""Settings that start heads well in short runs, off by default."""

from __future__ import annotations

import pytest
import torch

from clipzoo.errors import ConfigError
from clipzoo.heads.cloob import CloobHead
from clipzoo.heads.wpse import GaussianKernel, WpseHead
from clipzoo.types import Features


def wpse(initial_weight: float | None, weights: str = "positive") -> WpseHead:
    torch.manual_seed(0)
    return WpseHead(
        8, 8, 4, (1.0, 0.0), GaussianKernel(1.0), 16, 16, weights, 100.0, "mean", None, "all", 0.07, 1.0, 100.0, 0,
        initial_weight,
    )  # fmt: skip


def features(count: int) -> Features:
    tokens = torch.randn(count, 3, 8, generator=torch.Generator().manual_seed(1))
    return Features(tokens[:, 0], tokens)


def test_an_initial_weight_of_one_divides_the_scores_by_the_square_of_half_the_bound():
    paper, ours = (wpse(weight)(features(5), features(5)).image_to_text.dense() for weight in (None, 1.0))
    # Raw weights of about 1 change a weight of 50 by 0.25, and one of 1 by 1 %.
    assert (paper.norm() / ours.norm()).item() == pytest.approx(50.0**2, rel=0.05)
    for arguments in ((1.0, "signed"), (200.0, "positive")):
        with pytest.raises(ConfigError, match="initial_weight"):
            wpse(*arguments)


def test_cloob_compares_plain_embeddings_until_retrieval_starts():
    torch.manual_seed(0)
    heads = {start: CloobHead(8, 8, 4, 30.0, True, 8.0, start) for start in (0, 10)}
    heads[10].load_state_dict(heads[0].state_dict())
    plain = CloobHead(8, 8, 4, 30.0, False, 8.0)
    plain.load_state_dict(heads[0].state_dict())
    for step, same in ((0, plain), (9, plain), (10, heads[0])):
        heads[10].resample(step)
        scores = (head(features(6), features(6)).image_to_text.dense() for head in (heads[10], same))
        assert torch.equal(*scores)
    assert not torch.equal(*(head(features(6), features(6)).image_to_text.dense() for head in (heads[0], plain)))
