"""The base class of studies, their training, figures, records and page."""
