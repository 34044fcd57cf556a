"""Evaluation datasets: their catalogue, readers, prompts and the tar layout."""
