"""What a model can do: zero-shot classification, linear probes, retrieval. No evaluator names a head."""
