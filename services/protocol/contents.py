"""The values that name a block: the contents of its prefix, and the namespace that they are cached in.

A block's KV depends on all contents up to its end: token ids, and media that lie at some positions, where the ids say
nothing of what is there. Blocks with the same fingerprint, namespace and contents of their prefix have one name, and no
others have (block_hash.py). The trie of a worker, the gateways and the prefix index name blocks by these values alone.

No API takes media or adapters so far. Names distinguish them from the beginning, so that none of them can ever be
taken for another's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

MARK_BYTES = 16

NO_MARKS: Mapping[int, bytes] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Namespace:
    """The part of a model's caches that a request shares. Those of different namespaces share no block.

    salt: the tenant's, followed by the request's own. adapter: the name of what changes the model's weights; no client
    can put one into a salt, nor a salt into an adapter.
    """

    salt: str = ""
    adapter: str = ""


COMMON = Namespace()  # of all requests without a salt or an adapter


@dataclass(frozen=True, slots=True)
class Media:
    """Media at the positions start to start + length - 1 of a sequence. digest: of all that its KV depends on."""

    start: int
    length: int
    digest: bytes


class Contents(NamedTuple):
    """The contents of a sequence. token_ids: int32[n]. media: in order of their positions, none over another.

    The ids at positions of media are what a tokenizer puts there, mostly the same for all media.
    """

    token_ids: np.ndarray
    media: tuple[Media, ...] = ()

    def marks(self, block_size: int) -> Mapping[int, bytes]:
        """Returns, by index of block, the marks of blocks in which media begin: 16 bytes that name these media.

        A later block that the same media reach into has none: what names its prefix names the mark too. Raises
        ValueError for media that are empty, over each other or beyond the end.
        """
        if not self.media:
            return NO_MARKS
        starting: dict[int, list[Media]] = {}
        end = 0
        for each in self.media:
            if each.length < 1 or each.start < end or each.start + each.length > len(self.token_ids):
                raise ValueError(f"media at {each.start} with {each.length} positions, after those up to {end}")
            end = each.start + each.length
            starting.setdefault(each.start // block_size, []).append(each)
        return {index: _mark(media) for index, media in starting.items()}


def _mark(media: Sequence[Media]) -> bytes:
    encoded = b"".join(_number(each.start) + _number(each.length) + with_length(each.digest) for each in media)
    return blake2b(encoded, digest_size=MARK_BYTES, person=b"baton media").digest()


def with_length(value: bytes) -> bytes:
    """Returns a value behind its length, so that two of them, one after the other, are read in one way alone."""
    return _number(len(value)) + value


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")
