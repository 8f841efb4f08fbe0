"""The error of a benchmark that cannot be run as it was asked for."""


class CannotRun(Exception):
    """A run that cannot be made; its text is one line for a person."""
