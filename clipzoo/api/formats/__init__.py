"""Trained models in the formats of other libraries: open_clip, transformers, torch.export and ONNX."""
