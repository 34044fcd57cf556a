"""Objectives, one per file; conf/objective names them for Hydra."""
