"""Linear probes: frozen features, logistic regression, and the search for its penalty."""
