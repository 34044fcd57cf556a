"""Objectives: one file each, found by Hydra through conf/objective."""
