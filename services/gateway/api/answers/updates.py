"""The updates of a running request: what its clients get of the deltas that come from the dispatch side."""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

from services.gateway.api.answers.choice import Choice, Update, Usage
from services.gateway.api.answers.pace import EACH_TOKEN, Gathered, Pace
from services.gateway.api.generation import Delta, RunningRequest, TakeToken, never
from services.gateway.api.records.kept_text import KeptText
from services.gateway.api.records.request_record import RequestRecord
from services.gateway.metrics import GatewayMetrics
from services.protocol.outcomes import FinishReason


class UpdateSink(Protocol):
    """Takes updates as they come. No method may wait.

    `take_text` is the short form of `take`, for text that has nothing beside it. It is only called when `ready`, after
    which `take` returns True for an update without a finish reason.
    """

    def take(self, update: Update) -> bool:
        """Takes an update. False: the sink takes no more now."""

    def ready(self) -> bool:
        """True while `take_text` may be called."""

    def take_text(self, choice: int, text: str) -> None:
        """Takes the next text of a choice."""


class Updates:
    """The updates of a request's choices. Counts and times them."""

    def __init__(
        self,
        running: RunningRequest,
        choices: Sequence[Choice],
        choices_per_prompt: int,
        record: RequestRecord,
        metrics: GatewayMetrics,
        pace: Pace = EACH_TOKEN,
    ) -> None:
        self._in_short = pace.in_short
        self._gathered = [Gathered(pace.interval) for _ in choices] if pace.interval > 1 else None
        self._running = running
        self._choices = choices
        self._choices_per_prompt = choices_per_prompt
        self._record = record
        self._kept = record.text
        self._metrics = metrics
        self._last: list[float | None] = [None] * len(choices)  # by choice: when its last update came
        self._cached: list[int | None] = [None] * (len(choices) // choices_per_prompt)  # tokens, by prompt
        self._num_cached = 0  # of all prompts
        self._num_open = len(choices)

    @property
    def num_choices(self) -> int:
        """The number of choices, of all prompts together."""
        return len(self._choices)

    @property
    def done(self) -> bool:
        """True when every choice has its finish reason."""
        return self._num_open == 0

    async def next(self) -> Update:
        """Waits for the next update of any choice. Raises GenerationError."""
        return self.count(await self._running.next())

    async def relay(self, sink: UpdateSink) -> None:
        """Hands updates to the sink as they come, until the last one or until `take` returns False.

        Raises GenerationError, and what the sink raises.
        """
        if not self.done:
            await self._running.relay(_DeltaSink(self, sink))

    def text_taker(self, index: int, sink: UpdateSink) -> TakeToken:
        """Returns the function that every plain streamed token of a choice goes through. It does as little as possible:
        text alone becomes no update.

        The first token of a choice is never taken, nor is any token of a choice with stop strings, or where the pace
        forbids it.
        """
        choice, metrics, last = self._choices[index], self._metrics.tokens, self._last
        ready, extend, extend_part = sink.ready, choice.extend, choice.extend_part
        if extend is None or not self._in_short:
            return never
        take_text, take = (sink.take_text, sink.take) if self._kept is None else _keeping(self._kept, sink)

        def take_token(token: int) -> bool:
            since = last[index]
            if since is None or not ready():
                return False
            text, part = extend(token), None
            if text is None and (extend_part is None or (part := extend_part(token)) is None):
                return False
            last[index] = now = monotonic()
            metrics.note_token(now - since)
            choice.num_generated += 1
            if text:
                take_text(index, text)
            elif part is not None:
                take(part)
            return True

        return take_token

    @property
    def num_generated(self) -> int:
        """Tokens so far, of all choices together."""
        return sum(choice.num_generated for choice in self._choices)

    def count(self, delta: Delta) -> Update:
        """Turns a delta into an update, and counts it. Ends the choice of one that a stop string completed."""
        is_first = self._note_time(delta)
        choice = self._choices[delta.choice]
        before = choice.num_generated
        update = choice.take(delta)
        self._metrics.tokens.generated += choice.num_generated - before
        if self._kept is not None:
            _keep(self._kept, update)
        if update.finish_reason is not None:
            self._num_open -= 1
            self._record.finish_reason = update.finish_reason
            self._note_cached(delta)
            if delta.finish is FinishReason.NONE:
                self._running.end(delta.choice)
        elif is_first:  # a later attempt may have computed more
            self._note_cached(delta)
        return update if self._gathered is None else self._gathered[delta.choice].take(update)

    def _note_time(self, delta: Delta) -> bool:
        """Notes when a delta came. True: it is the first of its choice."""
        if self._note_gap(delta.choice):
            return False
        record = self._record
        if record.first_token is None:
            record.first_token = now = monotonic()
            self._metrics.ttft.observe(now - record.arrived)
        return True

    def _note_cached(self, delta: Delta) -> None:
        """Counts a prompt's tokens that no attempt at any of its choices computed, with the first and last of each."""
        prompt = delta.choice // self._choices_per_prompt
        known = self._cached[prompt]
        self._cached[prompt] = tokens = delta.cached_tokens if known is None else min(known, delta.cached_tokens)
        self._num_cached += tokens - (known or 0)
        self._record.cached_tokens = self._num_cached
        if not self._num_open:
            self._metrics.prompt_cached.inc(self._num_cached)

    def _note_gap(self, choice: int) -> bool:
        """Notes the time since the choice's last update. False: this is its first one."""
        now, last = monotonic(), self._last[choice]
        self._last[choice] = now
        if last is not None:
            self._metrics.tokens.note_gap(now - last)
        return last is not None

    def usage(self) -> Usage:
        """Token counts so far. A prompt counts once, however many choices it has."""
        counted = [choice.num_reasoning for choice in self._choices if choice.num_reasoning is not None]
        reasoning = sum(counted) if counted else None
        return Usage(self._record.prompt_tokens or 0, self.num_generated, self._record.cached_tokens or 0, reasoning)


def _keep(kept: KeptText, update: Update) -> None:
    calls = "".join([(call.name or "") + call.arguments for call in update.tool_calls])
    kept.note_answer(update.choice, update.reasoning + update.text + calls)


def _keeping(kept: KeptText, sink: UpdateSink) -> tuple[Callable[[int, str], None], Callable[[Update], bool]]:
    """Returns functions that do what the sink's `take_text` and `take` do, and keep the text."""

    def take_text(choice: int, text: str) -> None:
        kept.note_answer(choice, text)
        sink.take_text(choice, text)

    def take(update: Update) -> bool:
        _keep(kept, update)
        return sink.take(update)

    return take_text, take


class _DeltaSink:
    """A Sink that turns deltas into updates for another sink."""

    def __init__(self, updates: Updates, sink: UpdateSink) -> None:
        self._updates = updates
        self._sink = sink

    def take(self, delta: Delta) -> bool:
        """See Sink."""
        return self._sink.take(self._updates.count(delta)) and not self._updates.done

    def token_taker(self, choice: int) -> TakeToken:
        """See Sink."""
        return self._updates.text_taker(choice, self._sink)
