"""Pages made from the files of runs."""
