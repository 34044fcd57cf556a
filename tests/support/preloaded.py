"""What every forked process would compute again before its own work: the fork server imports this module once."""

from __future__ import annotations

import gc
import os

from clipzoo.config.compose import compose
from clipzoo.config.groups import VARIABLE
from clipzoo.data.tokenizer import ClipTokenizer
from clipzoo.evaluation.datasets.dataset import catalogue
from tests.support.option_files import parse_each_text_once

# The test that starts the server may have set it; the forked processes take the variables of their own test.
os.environ.pop(VARIABLE, None)
parse_each_text_once()
# Remembered from here on: signatures of our classes, Hydra's plugins and grammar, the merges, the benchmark datasets.
compose(["encoder=tiny", "data.shards=none.tar"])
ClipTokenizer(8)(["a"])
catalogue()
# Collections in a forked process would copy the memory of all these objects.
gc.collect()
gc.freeze()
