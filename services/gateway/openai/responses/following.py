"""The events of a background response, sent to a client as they come."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.api.errors import internal_error
from services.gateway.http.exchange import Exchange
from services.gateway.openai.responses.output import OutputItem
from services.gateway.openai.responses.replay import Replay
from services.gateway.openai.responses.response import GOING_ON
from services.gateway.openai.responses.running import RunningResponse


async def follow(exchange: Exchange, running: RunningResponse, after: int = -1) -> None:
    """Sends the events whose number is above `after` until the response has ended. Raises ApiError, ClientGone."""
    assert running.items is not None
    replay = Replay(running.described, running.items, after)
    await exchange.start_events()
    while True:
        ended, changed = running.ended.is_set(), running.changed  # read first: nothing comes after the end
        await _catch_up(exchange, replay)
        if ended:
            break
        await changed.wait()
    if running.described["status"] in GOING_ON:
        raise internal_error()  # its request failed before it was accepted
    await exchange.end_events(replay.end(running.described))


async def send_kept(exchange: Exchange, response: Mapping[str, Any], items: Sequence[OutputItem], after: int) -> None:
    """Sends the events of a response that has ended."""
    replay = Replay(response, items, after)
    await exchange.start_events()
    await _catch_up(exchange, replay)
    await exchange.end_events(replay.end(response))


async def _catch_up(exchange: Exchange, replay: Replay) -> None:
    while True:
        if events := replay.taken():
            await exchange.write(events)
        if not replay.behind:
            return
        await asyncio.sleep(0)
