"""Follows the registry: reports which workers there are, as often as the registry is asked."""

import asyncio
from collections.abc import Callable
from typing import NoReturn

import structlog

from services.prefix_index.redis_client import UNREACHABLE
from services.prefix_index.registry import Registry

POLL_EVERY_S = 1.0

log = structlog.get_logger()


async def follow_registry(registry: Registry, model: str, on_addresses: Callable[[set[str]], None]) -> NoReturn:
    """Calls `on_addresses` with the addresses of the model's workers whenever the registry answers, until cancelled."""
    reachable = True
    while True:
        try:
            workers = await registry.workers()
        except UNREACHABLE as error:
            if reachable:
                log.warning("registry not reachable; no news of workers", reason=str(error))
            reachable = False
        else:
            if not reachable:
                log.info("registry reachable again")
            reachable = True
            on_addresses({worker.address for worker in workers if worker.model == model})
        await asyncio.sleep(POLL_EVERY_S)
