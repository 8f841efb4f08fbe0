"""Measures parts of Baton alone: `python -m loadtest.micro PART`."""
