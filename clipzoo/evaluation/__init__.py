"""Evaluation: zero-shot classification, linear probes, retrieval. No evaluator names a head."""
