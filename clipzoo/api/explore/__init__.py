"""Contents of the pages of `clipzoo explore`, as plain values."""
