"""Settings for the whole suite."""

import torch

torch.set_num_threads(1)
