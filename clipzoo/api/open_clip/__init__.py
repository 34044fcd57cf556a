"""Convert open_clip models to models of this package."""

from clipzoo.api.open_clip.reading import from_open_clip

__all__ = ["from_open_clip"]
