"""Start a run from weights: of another run, a file, open_clip, timm or transformers."""
