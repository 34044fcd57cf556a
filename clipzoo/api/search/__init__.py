"""Search in images by captions, with any head."""
