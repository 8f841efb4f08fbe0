"""How a sequence ends: the codes that travel in frames."""

from enum import IntEnum


class FinishReason(IntEnum):
    """Carried by the row with the sequence's last token."""

    NONE = 0  # it goes on
    STOP = 1  # EOS or a stop token; that token is in the row
    LENGTH = 2  # max_tokens, or the context is full


class FailureCode(IntEnum):
    """Why a worker gave up a handle. The gateway decides what the client hears."""

    TOO_LARGE = 1  # cannot fit this worker's empty pool: never will
    NOT_NOW = 2  # would fit, but for blocks in quarantine or a full queue; costs no attempt
    HANDOFF = 3  # the handoff ended early; a new attempt may succeed
    DEADLINE = 4  # the request's own deadline
    OVER = 5  # a handle that was given up before
    UNSUPPORTED = 6  # this role cannot run it
