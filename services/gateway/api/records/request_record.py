"""The record of one client request, whichever API it came by: its figures, its times, and every attempt at it.

A record has no token of prompts or answers, and their text only where a gateway is told to keep it (`kept_text.py`).
"""

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from services.gateway.api.records.attempt_record import AttemptRecords
from services.gateway.api.records.kept_text import KeptText
from services.gateway.api.records.limits_left import LimitLeft

IGNORED_FIELDS = "x-baton-ignored-fields"  # of answers: fields of the request that nothing acts on
TOOLS = "x-baton-tools"  # of answers: `inserted` where the model's chat template knows no tools
_MAX_SHOWN = 10
_FIELD = re.compile(r"[A-Za-z0-9_.\[\] -]{1,80}")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=~-]{1,128}")


def sane_or_new_id(request_id: str) -> str:
    """Returns the id that a client gave its request where that is a sane one, else a new id."""
    return request_id if _REQUEST_ID.fullmatch(request_id) else secrets.token_hex(16)


class Progress(Protocol):
    """The answer of a request in flight, as far as it has come; `Updates` is one."""

    @property
    def num_generated(self) -> int:
        """Tokens so far, of all choices together, those that ended among them."""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Figures of one request. status: HTTP's number, or the name of gRPC's code; 0: there is none so far.

    The moments are `time.monotonic`'s, in seconds; None: not reached.
    """

    request_id: str
    endpoint: str = "other"
    generates: bool = False
    number: int = 0  # of the request among those of this gateway that generate, from 1; ids may repeat
    number_of_key: int = 0  # the same among those of its key
    model: str | None = None  # the name that answers carry; None: not resolved so far
    key_id: str | None = None  # of the caller's key; None: no key is asked for
    limits_left: Sequence[LimitLeft] = ()  # of the key; none: it has none, or was not asked
    status: int | str = 0
    error: str | None = None  # the code of the error that the client got
    num_ignored_fields: int = 0  # of the request: nothing acts on them
    ignored_fields: tuple[str, ...] = ()  # the names of some
    tools_inserted: bool = False  # in the prompt, in our words
    prompt_tokens: int | None = None
    cut_tokens: int = 0  # that were made of the prompts' texts, and are not in them
    cached_tokens: int | None = None
    generated_tokens: int | None = None
    running: Progress | None = None  # None: it does not generate now
    finish_reason: str | None = None
    ttft_slo_s: float | None = None  # within which the first token was wanted; None: whenever
    text: KeptText | None = None  # None: no text is kept
    attempts: AttemptRecords = field(default_factory=AttemptRecords)
    arrived_at: float = field(default_factory=time.time)  # in seconds since 1970
    arrived: float = field(default_factory=monotonic)
    parsed: float | None = None  # read, and checked
    tokenized: float | None = None
    first_token: float | None = None  # it could be sent to the client
    ended: float | None = None
    trace_context: dict[str, str] | None = None  # the client's, in W3C's headers; None: spans are not wanted

    def note_ignored_fields(self, names: Sequence[str]) -> None:
        """Counts more ignored fields and keeps the first names. They are the client's own: odd ones are left out."""
        self.num_ignored_fields += len(names)
        first = names[: _MAX_SHOWN - len(self.ignored_fields)]
        self.ignored_fields += tuple(name for name in first if _FIELD.fullmatch(name))

    @property
    def shown_ignored_fields(self) -> str:
        """The names of some ignored fields, for IGNORED_FIELDS."""
        more = ("...",) if len(self.ignored_fields) < self.num_ignored_fields else ()
        return ", ".join((*self.ignored_fields, *more))

    @property
    def ttft_s(self) -> float | None:
        """The time to the first token, in seconds; None: there was none so far."""
        return None if self.first_token is None else self.first_token - self.arrived
