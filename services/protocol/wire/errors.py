"""The error of everything that parses messages."""


class WireError(ValueError):
    """A message that no correct sender sends."""
