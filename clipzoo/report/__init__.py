"""Pages made from what runs have written."""
