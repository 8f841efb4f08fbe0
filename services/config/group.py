"""The options of a worker of several hosts, with one rank of its model on each."""

from dataclasses import dataclass
from typing import Annotated

from services.config.hosts import AddressError, split_address
from services.config.option import Option, OptionError

_GROUP = "A worker of several hosts"


def parse_group(text: str) -> str:
    """The address of `host:port`. Raises OptionError."""
    try:
        split_address(text)
    except AddressError as error:
        raise OptionError(str(error)) from error
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """The place of a process in a worker of several hosts; all None: its worker is on one host."""

    rank: Annotated[
        int | None,
        Option(
            panel=_GROUP,
            min=0,
            help="The number of this host in a worker of several. Rank 0 is the worker to everybody else; the others "
            "join it, take its options, and listen at --port for reads of their KV alone.",
        ),
    ] = None
    world_size: Annotated[
        int | None,
        Option(panel=_GROUP, min=2, help="How many hosts that worker has: its --tensor-parallel-size."),
    ] = None
    group: Annotated[
        str | None,
        Option(
            panel=_GROUP,
            parse=parse_group,
            metavar="HOST:PORT",
            help="Where rank 0 of that worker waits for the others: an address of its host, the same for all ranks.",
        ),
    ] = None

    @property
    def is_led(self) -> bool:
        """Returns True for a rank above 0."""
        return bool(self.rank)
