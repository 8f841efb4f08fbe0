"""One kept response as stores have it: three lines, checked when they are read back."""

from dataclasses import dataclass
from typing import Literal

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

    def pack(self) -> bytes:
        """Returns the bytes that a store keeps: a line each. JSON has no line breaks in it."""
        return b"\n".join((self.response, self.input, self.pieces) if self.pieces else (self.response, self.input))

    @classmethod
    def unpack(cls, packed: bytes, response_id: str) -> "KeptResponse":
        """Returns what was packed of the response with this id. Raises ValueError for what no gateway packed."""
        response, _, rest = packed.partition(b"\n")
        items, _, pieces = rest.partition(b"\n")
        kept = cls(response, items, pieces)
        kept._check(response_id)
        return kept

    def _check(self, response_id: str) -> None:
        """Raises ValueError, of which pydantic's error is one."""
        response = _Response.model_validate_json(self.response)
        _INPUT.validate_json(self.input)
        if response.id != response_id:
            raise ValueError(f"it is the response {response.id!r}")
        if response.background != bool(self.pieces) or (response.status in GOING_ON) == self.ended:
            raise ValueError(f"its status is {response.status}, and its last line another's")
        if self.pieces and self.ended and len(_PIECES.validate_json(self.pieces)) != len(response.output):
            raise ValueError("its items and their pieces are not equally many")
