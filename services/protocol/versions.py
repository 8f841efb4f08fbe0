"""The version of the protocol, and what a neighbour of an older minor version is sent instead.

A process says its version in its hello. Another major version is refused in words. Most of what a minor version brings
needs no look at the version, because the older side skips a field that it does not know and misses nothing. The rest
is in `Since`: the older side would take it for an error or for something else, so a sender looks at the version first.
What a worker must act on for an answer to be right is not a matter of versions: see capabilities.py.
"""

from dataclasses import replace
from enum import IntEnum

from services.protocol.frames import Failure, Frame
from services.protocol.outcomes import FailureCode


class Since(IntEnum):
    """The minor version that brought something which older neighbours must not be sent."""

    COMMANDS = 1  # to workers: several commands in one message
    DRAINING = 2  # to gateways: FailureCode.DRAINING
    NEWS = 3  # to gateways: WorkerNews


PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = int(max(Since))


def frame_for(minor: int, frame: Frame) -> Frame:
    """Returns a frame as a gateway of this minor version understands it; the frame itself where nothing differs."""
    if minor >= Since.DRAINING or not frame.failures:
        return frame
    return replace(frame, failures=[_without_draining(failure) for failure in frame.failures])


def _without_draining(failure: Failure) -> Failure:
    """NOT_NOW costs the request no attempt either, and gateways of every version know it."""
    return replace(failure, code=FailureCode.NOT_NOW) if failure.code is FailureCode.DRAINING else failure
