"""Rank 0's ways to the other ranks of its group, and theirs to it: two seams, each with an implementation for ranks of
one host and one for ranks that are hosts.

    seam            on one host                                  on several
    StepChannel     StepRing: a ring in shared memory            HostRanks: messages over TCP
    StepReader      StepRing, a reader's end                     GroupMember
    OtherRanks      RankProcesses: children, looked at           HostRanks: connections that beat
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.engine.kernels.ranks import Ranks
from services.engine.runner.group.cores import LeadingCores


class StepChannel(Protocol):
    """The channel by which rank 0 tells the others what to run. One thread uses it."""

    def send(self, parts: Sequence[bytes]) -> None:
        """Sends the parts as one message to all ranks above 0. Raises RankLostError."""

    def wait_done(self, check: Callable[[], None]) -> None:
        """Waits until all ranks have done all messages. check: asked again and again; its error comes through."""

    def waited_s(self) -> list[float]:
        """Returns what each rank above 0 said last of its waits."""


class StepReader(Protocol):
    """A rank's end of that channel."""

    def receive(self) -> bytearray:
        """Returns the next message, when it is there. Raises RankLostError where there will be none."""

    def done(self, waited_s: float) -> None:
        """Says that this rank has done the message that it received last. Raises RankLostError.

        waited_s: `Ranks.waited_s` of this rank.
        """


class OtherRanks(Protocol):
    """The ranks above 0, as rank 0 sees to them."""

    lost: str | None  # why the group is over, in words

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Watches all ranks, which have loaded. on_lost: called once, on a thread of its own, with the reason."""

    def why_lost(self) -> str | None:
        """Returns why the group is over, for who has noticed that it is; None: no rank is known to be lost."""

    def close(self) -> None:
        """Ends the watch, and all ranks, which were told to end."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupLinks:
    """All that rank 0 has of the others."""

    steps: StepChannel
    ranks: Ranks
    others: OtherRanks
    cores: LeadingCores
