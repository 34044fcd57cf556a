"""clipzoo: contrastive image-text pretraining with any encoder, similarity head and objective."""

__version__ = "0.1.0"
