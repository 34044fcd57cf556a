"""Searches: sweeps whose points are drawn from ranges, one after the other, from one study on the disk."""
