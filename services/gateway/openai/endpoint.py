"""The life of a generating request over HTTP: read, checked, run, written to its client."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from services.gateway.api.choice import Update
from services.gateway.api.dialect import DONE, Answer, Request
from services.gateway.api.request_runner import READING_GRACE_S, RequestRunner, Updates
from services.gateway.api.validation import parse_request
from services.gateway.openai.exchange import Exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a client may ask of this gateway."""

    request_timeout_s: float
    max_body_bytes: int


class GenerationEndpoint(Generic[Request]):
    """Answers requests of one dialect."""

    def __init__(self, runner: RequestRunner[Request], limits: Limits) -> None:
        self._runner = runner
        self._limits = limits

    async def __call__(self, exchange: Exchange) -> None:
        """Raises ApiError, ClientGone."""
        dialect, timeout_s = self._runner.dialect, self._limits.request_timeout_s
        exchange.record.generates = True
        body = await exchange.read_json(self._limits.max_body_bytes)
        request = parse_request(body, dialect.kind, dialect.neutral)
        del body
        self._runner.check(request)
        answer = dialect.answer(request, exchange.request_id, self._runner.model.name, int(time.time()))
        async with (
            exchange.while_connected(timeout_s + READING_GRACE_S),
            self._runner.run(request, exchange.request_id, exchange.record, timeout_s) as updates,
        ):
            if request.stream:
                await _stream(exchange, updates, answer, with_usage=request.include_usage)
            else:
                await _collect(exchange, updates, answer)


async def _stream(exchange: Exchange, updates: Updates, answer: Answer, *, with_usage: bool) -> None:
    # The status waits for the first token: until then, an error can still be one.
    update, stream = await updates.next(), exchange.stream
    await exchange.start_events()
    events = answer.opening(updates.num_choices) + answer.chunk(update)

    def send_on(update: Update) -> bool:
        """False: the client does not read fast enough, so what comes next has to wait."""
        nonlocal events
        events = answer.chunk(update) if update.worth_a_chunk else b""
        if events and not updates.done:
            if not stream.ready():
                return False
            stream.write(events)
        return True

    def send_text(choice: int, text: str) -> None:
        stream.write(answer.text_chunk(choice, text))

    while not updates.done:
        await exchange.write(events)
        await updates.relay(send_on, stream.ready, send_text)
    if with_usage:
        events += answer.usage_chunk(updates.usage())
    await exchange.end_events(events + DONE)


async def _collect(exchange: Exchange, updates: Updates, answer: Answer) -> None:
    parts: list[list[Update]] = [[] for _ in range(updates.num_choices)]
    while not updates.done:
        update = await updates.next()
        parts[update.choice].append(update)
    await exchange.respond(200, answer.body([_joined(choice) for choice in parts], updates.usage()))


def _joined(parts: Sequence[Update]) -> Update:
    """All updates of one choice as one."""
    first, last = parts[0], parts[-1]
    return Update(
        first.choice,
        "".join(part.text for part in parts),
        [token for part in parts for token in part.tokens],
        None if first.logprobs is None else [entry for part in parts for entry in part.logprobs or ()],
        last.finish_reason,
        first.prompt_logprobs,
    )
