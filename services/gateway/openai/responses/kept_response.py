"""One kept response as stores have it: three lines with a digest of them, checked when they are read back.

The digest is the last field of the response, so that a gateway of an older version reads what this one kept: it takes
the field for one of the response. What an older version kept has none, and is looked at as that version did.
"""

import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import orjson
from pydantic import BaseModel, TypeAdapter

from services.gateway.openai.responses.response import GOING_ON, Status

UNENDED = b"unended"
UNENDED_END = b"\n" + UNENDED  # of what is packed of a response that has not ended


class _Item(BaseModel):
    id: str
    type: str


class _Response(BaseModel):
    id: str
    object: Literal["response"]
    status: Status
    background: bool
    output: list[_Item]


_DIGEST_BYTES = 16
_SEALED = re.compile(rb',"kept_digest":"([0-9a-f]{%d})"}' % (2 * _DIGEST_BYTES))
_SEALED_BYTES = len(',"kept_digest":""}') + 2 * _DIGEST_BYTES
_LAST_FIELD = "prompt_cache_key"  # of a response without a digest
_INPUT = TypeAdapter(list[_Item])
_PIECES = TypeAdapter(list[tuple[list[int], list[tuple[int, int]]]])


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response, and the items of the conversation that it answers, both as JSON.

    pieces: of a response that was generated in the background, where its texts were cut (pieces.py), or UNENDED while
    it is being generated; empty for others.
    """

    response: bytes
    input: bytes
    pieces: bytes = b""

    @property
    def ended(self) -> bool:
        """False: a gateway generates the response, or did so when it died."""
        return self.pieces != UNENDED

    def pack(self, response_id: str) -> bytes:
        """Returns the bytes that a store keeps: a line each. JSON has no line breaks in it."""
        sealed = self.response[:-1] + b',"kept_digest":"' + self._digest(response_id) + b'"}'
        return b"\n".join((sealed, self.input, self.pieces) if self.pieces else (sealed, self.input))

    @classmethod
    def unpack(cls, packed: bytes, response_id: str) -> "KeptResponse":
        """Returns what was packed of the response with this id. Raises ValueError for what no gateway packed."""
        response, _, rest = packed.partition(b"\n")
        items, _, pieces = rest.partition(b"\n")
        if (sealed := _SEALED.fullmatch(response, max(0, len(response) - _SEALED_BYTES))) is None:
            older = cls(response, items, pieces)
            older._check(response_id)
            return older
        kept = cls(response[: sealed.start()] + b"}", items, pieces)
        if sealed[1] != kept._digest(response_id):
            raise ValueError("its digest is another's")
        return kept

    def _digest(self, response_id: str) -> bytes:
        """The hex of what differs where anything of the response does, or it is kept under another id."""
        found = blake2b(response_id.encode(), digest_size=_DIGEST_BYTES)
        for part in (self.response, self.input, self.pieces):
            found.update(b"\n")
            found.update(part)
        return found.hexdigest().encode()

    def _check(self, response_id: str) -> None:
        """Looks at a response without a digest. Raises ValueError, of which pydantic's error is one."""
        response = _Response.model_validate_json(self.response)
        _INPUT.validate_json(self.input)
        if (last := next(reversed(orjson.loads(self.response)))) != _LAST_FIELD:
            raise ValueError(f"its last field is {last!r}: a digest that was damaged, perhaps")
        if response.id != response_id:
            raise ValueError(f"it is the response {response.id!r}")
        if response.background != bool(self.pieces) or (response.status in GOING_ON) == self.ended:
            raise ValueError(f"its status is {response.status}, and its last line another's")
        if self.pieces and self.ended and len(_PIECES.validate_json(self.pieces)) != len(response.output):
            raise ValueError("its items and their pieces are not equally many")
