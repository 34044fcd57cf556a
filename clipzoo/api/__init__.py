"""The Python API: train, load and exchange models; build the parts of a configuration."""
