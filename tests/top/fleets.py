"""Gateways for the tests of `services/top`: the API side behind a real HTTP server, with workers as a test says."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from services.gateway.overview import BlockUse, WorkerState
from services.top.config import GatewayChoice
from tests.gateway.console.scripted_fleet import a_worker
from tests.gateway.running_api import Api

PREFILL, DECODE = "127.0.0.1:9100", "127.0.0.1:9200"


def choice(api: Api, **others: Any) -> GatewayChoice:
    """The gateway's admin port."""
    return GatewayChoice(url=str(api.admin.base_url).rstrip("/"), **others)


def set_workers(api: Api) -> None:
    """One of each role, and one that is gone."""
    since = time.time() - 75
    api.fleet.workers = [
        a_worker(PREFILL, since=since, described=_described(PREFILL, "prefill")),
        a_worker(DECODE, since=since, blocks=BlockUse(48, 64, 2), described=_described(DECODE, "decode")),
        a_worker(
            "127.0.0.1:9201",
            WorkerState.GONE,
            why="the connection broke",
            since=since,
            restarted=1,
            described=_described("127.0.0.1:9201", "decode"),
        ),
    ]


def _described(address: str, role: str) -> dict[str, Any]:
    return {
        "address": address,
        "incarnation": f"life of {address}",
        "role": role,
        "running": 3,
        "waiting": 1,
        "kernels": "avx2",
        "protocol": "1.3",
    }


async def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    """Waits until something is so. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.02)
