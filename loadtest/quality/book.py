"""A text that models are asked about: chapters I to V of a book in the public domain, which lie beside this file.

Lewis Carroll, Alice's Adventures in Wonderland (1865), the Millennium Fulcrum edition 2.9, as the sources of Brotli
have it among their test data.
"""

import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

SOURCE = "chapters I to V of Alice's Adventures in Wonderland by Lewis Carroll (1865, public domain)"

_FILE = Path(__file__).with_name("alice.txt")
_LETTER = re.compile("[A-Za-z]")
_HEADING = re.compile(r" {10,}\S")  # alone in the middle of its line: a chapter's number or title


@cache
def paragraphs() -> tuple[str, ...]:
    """Returns the paragraphs in order, each on one line, without headings of chapters and rows of asterisks."""
    blocks = [block.lstrip("\n") for block in re.split(r"\n\s*\n", _FILE.read_text(encoding="ascii"))]
    return tuple(" ".join(block.split()) for block in blocks if _LETTER.search(block) and not _HEADING.match(block))


def passages(num_chars: int) -> list[str]:
    """Cuts the text into runs of whole paragraphs, each as short as `num_chars` characters allow; the rest is left."""
    found, run = [], ""
    for paragraph in paragraphs():
        run = f"{run}\n\n{paragraph}" if run else paragraph
        if len(run) >= num_chars:
            found.append(run)
            run = ""
    return found


def openings(count: int) -> list[str]:
    """Cuts the text into so many pieces of as many words each, give or take one."""
    words = " ".join(paragraphs()).split()
    ends = np.linspace(0, len(words), count + 1).astype(int).tolist()
    return [" ".join(words[begin:end]) for begin, end in pairwise(ends)]
