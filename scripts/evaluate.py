"""Evaluate a run, a checkpoint or an open_clip model.

python scripts/evaluate.py run=runs/demo eval=demo
python scripts/evaluate.py run=runs/demo/checkpoints/step_00001000.pt eval=demo eval.draws=5
python scripts/evaluate.py model=ViT-B-32 pretrained=laion2b_s34b_b79k eval=paper
torchrun --nproc-per-node 8 scripts/evaluate.py run=runs/demo eval=paper
"""

from __future__ import annotations

import sys

from clipzoo.config import compose as configuration
from clipzoo.errors import ConfigError

if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        sys.exit()
    try:
        from clipzoo.cli.evaluate import evaluate

        evaluate(sys.argv[1:])
    except ConfigError as error:
        configuration.leave(error)
