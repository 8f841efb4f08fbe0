"""Follows the registry: reports which workers there are, as often as the registry is asked.

Workers of several models may be registered in one Redis. Those of other models are refused: a gateway has no links to
them, and says so once for each.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import NoReturn

import structlog

from services.gateway.dispatch.links import of_another_model
from services.prefix_index.reachability import Reachability
from services.prefix_index.redis_client import UNREACHABLE
from services.prefix_index.registry import Registry

POLL_EVERY_S = 1.0

log = structlog.get_logger()


async def follow_registry(
    registry: Registry,
    model: str,
    on_workers: Callable[[set[str], Mapping[str, str]], None],
    reachability: Reachability | None = None,
) -> NoReturn:
    """Calls `on_workers` whenever the registry answers, until cancelled.

    reachability: is told whether it does.
    on_workers: is told the addresses of the model's workers, and those of others with the reason why they are refused.
    """
    reachability = reachability or Reachability()
    reachable = True
    refused: dict[str, str] = {}
    while True:
        try:
            workers = await registry.workers()
        except UNREACHABLE as error:
            if reachable:
                log.warning("registry not reachable; no news of workers", reason=str(error))
            reachable = False
            reachability.note_failure(str(error))
        else:
            reachability.note_answer()
            if not reachable:
                log.info("registry reachable again")
            reachable = True
            addresses = {worker.address for worker in workers if worker.model == model}
            others = {each.address: of_another_model(each.model, model) for each in workers if each.model != model}
            for address, reason in others.items() - refused.items():
                log.info("worker refused", address=address, reason=reason)
            refused = others
            on_workers(addresses, others)
        await asyncio.sleep(POLL_EVERY_S)
