"""The ways in which an attempt ends: codes that travel in frames."""

from enum import IntEnum


class FinishReason(IntEnum):
    """The reason why a sequence finished, in the row with its last token."""

    NONE = 0  # the sequence continues
    STOP = 1  # EOS or a stop token; that token is in the row
    LENGTH = 2  # max_tokens, or the context is full


class FailureCode(IntEnum):
    """The reason why a worker failed an attempt. The gateway decides what its client is told."""

    TOO_LARGE = 1  # does not fit even into this worker's empty pool
    NOT_NOW = 2  # would fit without blocks in quarantine or a full queue; costs no attempt
    HANDOFF = 3  # the handoff ended early; a new attempt may succeed
    DEADLINE = 4  # the request's own deadline
    OVER = 5  # the handle was over before
    UNSUPPORTED = 6  # neither this worker can run it nor another one: its fault is the request's
    DRAINING = 7  # the worker is about to end; costs no attempt; see versions.py
    NOT_FINITE = 8  # what the model computed for it is not finite, on a worker that computes right otherwise
