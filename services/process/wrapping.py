"""Lines broken at words to a terminal's width, with a hanging indent. Colours take no room."""

import re

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_MIN_WIDTH = 20  # of what is left beside the indent; on a narrower terminal the line stays whole


def wrap(line: str, columns: int | None, indent: int) -> str:
    """Breaks a line at spaces; further lines are indented. columns: None leaves it whole. A word is never broken."""
    if columns is None or columns < indent + _MIN_WIDTH or _width(line) <= columns:
        return line
    lines, current = list[str](), ""
    for word in re.split(r"(?<=\S) (?=\S)|(?<=\S)(?= {2,}\S)", line):
        space = "" if not current or word.startswith(" ") else " "
        if current.strip() and _width(current + space + word) > columns:
            lines.append(current)
            current = " " * indent + word.lstrip()
        else:
            current += space + word
    return "\n".join([*lines, current])


def _width(text: str) -> int:
    return len(_ESCAPES.sub("", text))
