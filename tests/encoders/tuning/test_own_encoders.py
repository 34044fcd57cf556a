"""Encoders without towers: they train whole, and a setting that needs a tower names the attribute."""

from __future__ import annotations

import pytest

from clipzoo.encoders.tuning import Frozen, Full, Tuning
from clipzoo.errors import ConfigError
from tests.support.training_step import Towers


def test_an_encoder_without_towers_trains_whole():
    encoder = Towers()
    tuning = Tuning(Full(1.0, 1.0), Full(1.0, 1.0), 1.0, 0)
    tuning.apply(encoder)
    assert all(parameter.requires_grad for parameter in encoder.parameters())
    assert tuning.factors(encoder, []) == {}


def test_a_tower_that_an_encoder_lacks_cannot_be_frozen_or_slowed():
    message = "tune.image needs a tower, but Towers has no attribute image_tower"
    with pytest.raises(ConfigError, match=message):
        Tuning(Frozen(0.0), Full(1.0, 1.0), 1.0, 0).apply(Towers())
    with pytest.raises(ConfigError, match=message):
        Tuning(Full(0.1, 1.0), Full(1.0, 1.0), 1.0, 0).factors(Towers(), [])
