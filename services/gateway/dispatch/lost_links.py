"""Why there is no stream to a worker, in words for people: gRPC's own texts name files, codes and system calls."""

import re

import grpc

ENDED = "it ended the stream ("  # then the status, and the bracket's end
_OF_GRPC = re.compile(rf"\b({'|'.join(grpc.StatusCode.__members__)}): (.*)", re.DOTALL)
# The first of these that a text has says what happened; capital letters count as small ones.
_BY_TEXT = (
    (("cancelling all calls",), "it ended its stream"),  # its server stops
    (("connection refused",), "nothing listens at its address"),
    (
        ("socket closed", "connection reset", "broken pipe", "connection closed"),
        "its connection broke: it may have ended",
    ),
    (("ping timeout", "keepalive"), "it does not answer pings"),
    (("no route to host", "unreachable"), "the network has no way to its address"),
    (("handshake", "ssl", "tls", "certificate"), "TLS with it failed"),
    (("dns", "name resolution", "name or service"), "its name has no address"),
    (("timed out", "timeout", "deadline"), "its host does not answer"),
)
_BY_CODE = {
    "OK": "it ended its stream",
    "CANCELLED": "it ended its stream",
    "UNIMPLEMENTED": "what listens at its address is no worker",
    "UNAVAILABLE": "its connection failed",
}
# With these the worker's own words follow.
_REFUSALS = {
    "FAILED_PRECONDITION": "it refuses this gateway",
    "PERMISSION_DENIED": "it does not let this gateway in",
    "UNAUTHENTICATED": "it does not let this gateway in",
}


def in_plain_words(why: str) -> str:
    """Returns a link's `why_not` in plain words: of a gRPC status what it means, anything else as it is."""
    if (found := _OF_GRPC.search(why)) is None:
        return why
    code, details = found[1], found[2].removesuffix(")") if why.startswith(ENDED) else found[2]
    if code in _REFUSALS:
        return f"{_REFUSALS[code]}: {details}"
    if code == "UNAVAILABLE":
        small = details.lower()
        for texts, words in _BY_TEXT:
            if any(text in small for text in texts):
                return words
    return _BY_CODE.get(code, f"its stream failed ({code})")
