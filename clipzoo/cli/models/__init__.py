"""Commands on trained models: export, index and search."""
