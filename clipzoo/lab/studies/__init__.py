"""The papers' small experiments: training against closed forms, claims against measurements."""

from __future__ import annotations
