"""Measurements of single parts of Baton: `python -m loadtest micro PART`."""
