"""The pace of updates: how many tokens each one waits for, and whether tokens may come without one."""

from dataclasses import dataclass

from services.gateway.api.answers.choice import Update, joined
from services.gateway.api.requests.schema import CommonRequest


@dataclass(frozen=True, slots=True)
class Pace:
    """interval: the tokens of an update, apart from a choice's first and last one.

    in_short: single tokens may become text by the short form of `UpdateSink`; else each comes in an update.
    """

    interval: int = 1
    in_short: bool = True


EACH_TOKEN = Pace()


def pace_of(request: CommonRequest) -> Pace:
    """Returns the pace that a request asks for."""
    interval = request.stream_interval or 1
    return Pace(interval, in_short=interval == 1 and not request.return_token_ids and not request.continuous_usage)


class Gathered:
    """The updates of one choice, joined until they have `interval` tokens. The first and the last one wait for none."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._begun = False
        self._waiting: list[Update] = []
        self._num_tokens = 0

    def take(self, update: Update) -> Update:
        """Returns this update with those that waited, or an empty one while they wait on."""
        self._waiting.append(update)
        self._num_tokens += len(update.tokens)
        if self._begun and update.finish_reason is None and self._num_tokens < self._interval:
            return Update(update.choice, "", [], None, None)
        gathered = joined(self._waiting)
        self._begun, self._waiting, self._num_tokens = True, [], 0
        return gathered
