"""Training of a part of the model: cached features, factors of the learning rate, the frozen part of checkpoints."""
