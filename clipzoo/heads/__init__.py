"""Similarity heads: one file each, found by Hydra through conf/head."""
