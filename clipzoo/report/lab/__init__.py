"""The page of a comparison lab, from the records of its trainings."""
