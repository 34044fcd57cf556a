"""Which parameters of the towers train, and how fast: full, frozen, the last layers, low-rank adapters."""
