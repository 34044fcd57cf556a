"""Commands that train many models."""
