"""The papers' small experiments, run: closed forms against training, claims against measurements."""
