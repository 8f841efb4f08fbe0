"""The terminal of this process: how wide it is, and whether it has colours."""

import os
import sys
from typing import TextIO


def width(stream: TextIO | None = None) -> int | None:
    """Columns of the terminal that a stream, by default stdout, goes to; None where it goes elsewhere.

    COLUMNS in the environment names it for any stream, as a terminal's own tools have it.
    """
    named = os.environ.get("COLUMNS", "")
    if named.isdecimal() and int(named) > 0:
        return int(named)
    try:
        return os.get_terminal_size((stream or sys.stdout).fileno()).columns or None
    except (OSError, ValueError):
        return None


def has_colours(stream: TextIO | None = None) -> bool:
    """True where a stream, by default stdout, is a terminal with colours, and NO_COLOR does not forbid them."""
    is_terminal = (stream or sys.stdout).isatty()
    return is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
