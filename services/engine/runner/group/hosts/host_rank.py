"""One rank on another host, as rank 0 has it: its connections, and what it has said."""

import threading
from collections.abc import Callable

from services.engine.runner.group.connection import Connection, ConnectionLostError
from services.engine.runner.group.hosts.host_messages import Done, Entry, Refused, Room, Say, StrangeMessageError
from services.engine.runner.group.rank_config import RankAnswer


class HostRank:
    """A rank that has been told the terms. `changed` guards what it says, and is notified of it."""

    def __init__(
        self,
        rank: int,
        steps: Connection,
        changed: threading.Condition,
        on_entry: Callable[[Entry], None],
    ) -> None:
        """on_entry: called with what the rank has set in the store, on the thread of `read`."""
        self.rank, self.steps = rank, steps
        self.kv: Connection | None = None
        self.room: Room | None = None
        self.answer: RankAnswer | None = None
        self.num_done = 0  # messages of steps
        self.waited_s = 0.0  # as it said last
        self._changed, self._on_entry = changed, on_entry

    def read(self) -> str:
        """Reads what the rank says, until it is lost. Returns why, in words."""
        try:
            while True:
                message = self.steps.receive()
                if (refused := self._take(message)) is not None:
                    return refused
        except ConnectionLostError as error:
            return f"rank {self.rank} is lost: {error}"
        except StrangeMessageError as error:
            return f"rank {self.rank} sends {error}"

    def _take(self, message: bytearray) -> str | None:
        """Takes one message. Returns the rank's words where it refuses to join."""
        kind = message[0]
        if kind == Say.DONE:
            done = Done.unpack(message)
            with self._changed:
                self.num_done, self.waited_s = self.num_done + 1, done.waited_s
                self._changed.notify_all()
        elif kind == Say.SET:
            self._on_entry(Entry.unpack(message))
        elif kind == Say.REFUSED:
            return f"rank {self.rank}: {Refused.unpack(message).reason}"
        else:
            self._take_news(message)
        return None

    def _take_news(self, message: bytearray) -> None:
        with self._changed:
            if message[0] == Say.ANSWER:
                try:
                    self.answer = RankAnswer.unpack(bytes(message[1:]))
                except (ValueError, KeyError, TypeError) as error:
                    raise StrangeMessageError("an answer of another version") from error
            else:
                self.room = Room.unpack(message)
            self._changed.notify_all()

    def close(self) -> None:
        """Closes its connections, so that it ends."""
        self.steps.close()
        if self.kv is not None:
            self.kv.close()
