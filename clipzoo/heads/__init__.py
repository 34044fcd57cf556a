"""Similarity heads, one per file; conf/head names them for Hydra."""
