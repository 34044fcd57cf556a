"""Convert models of transformers to models of this package."""

from clipzoo.api.transformers.reading import from_transformers

__all__ = ["from_transformers"]
