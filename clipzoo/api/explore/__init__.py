"""What `clipzoo explore` shows of trained models, as plain values."""
