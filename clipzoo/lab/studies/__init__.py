"""The papers' small experiments: training against closed forms, claims against measurements."""
