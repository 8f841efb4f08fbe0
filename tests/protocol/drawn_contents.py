"""Contents and namespaces drawn by hypothesis, so few that drawn ones are often equal or almost so."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from services.protocol.contents import Contents, Media, Namespace

TEXTS = st.text("ab\0", max_size=2)
NAMESPACES = st.builds(Namespace, TEXTS, TEXTS)
_DIGESTS = st.sampled_from([b"", b"a", b"ab", b"b"])


@st.composite
def _contents(draw: Any) -> Contents:
    length = draw(st.integers(0, 9))
    token_ids = np.array(draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)), dtype=np.int32)
    media, at = [], 0
    while at < length and draw(st.booleans()):
        start = draw(st.integers(at, length - 1))
        media.append(Media(start, draw(st.integers(1, min(3, length - start))), draw(_DIGESTS)))
        at = start + media[-1].length
    return Contents(token_ids, tuple(media))


CONTENTS = _contents()


def identities(fingerprint: str, namespace: Namespace, contents: Contents, block_size: int) -> list[object]:
    """All that each full block depends on, as plain values."""
    ends = range(block_size, len(contents.token_ids) + 1, block_size)
    return [
        (
            fingerprint,
            namespace,
            tuple(contents.token_ids[:end].tolist()),
            tuple(each for each in contents.media if each.start < end),
        )
        for end in ends
    ]
