"""Statistics of comparisons: intervals, tests of differences, power and scaling laws. On numpy and scipy."""
