"""Files behind fsspec URLs: reading them in ranges, and keeping a copy of a local folder in a store."""
