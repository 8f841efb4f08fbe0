"""Consoles of a running gateway in a terminal: `baton top`, `baton ls` and `baton requests`."""
