"""A gateway with a scripted model in place of workers, in a network of its own in which there is nothing else."""

import asyncio
import contextlib
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.gateway.openai.responses.store import MemoryResponseStore
from tests.clients.families import Family
from tests.clients.scripted_model import ScriptedModel
from tests.faults.namespace import private_network
from tests.gateway.running_api import MODEL, Api, running_api
from tests.machine import NAMESPACES, has

MAX_MODEL_LEN = 262_144
KEPT_S = 600
ALIASES = (f"claude-*={MODEL}", f"gpt-*={MODEL}")  # for programs that know models of their vendor's by name
_REQUESTS = re.compile(r'^baton_requests_total\{endpoint="(?!metrics)(.+?)",status="(.+?)"\} (\S+)$', re.MULTILINE)


@dataclass
class ScriptedGateway:
    """A gateway that runs.

    enter: takes a process that starts into the gateway's network; None: that is the one of all.
    may_refuse: the requests that a client makes to learn what there is, and has refused.
    """

    url: str
    model: ScriptedModel
    enter: Callable[[], None] | None
    _api: Api
    _loop: asyncio.AbstractEventLoop
    may_refuse: int = 0

    def answered(self) -> Counter[tuple[str, str]]:
        """Counts the requests of clients so far, by endpoint and status."""
        page = self._run(self._api.admin.get("/metrics")).text
        return Counter({(endpoint, status): int(float(number)) for endpoint, status, number in _REQUESTS.findall(page)})

    def num_elsewhere(self) -> int:
        """Counts what was meant for addresses outside the gateway's own network, which there is no way to."""
        return 0 if self.enter is None else int(self._run(_num_without_route()))

    def post(self, path: str, **fields: Any) -> Any:
        """Sends a request for the model. Returns the answer, as JSON."""
        response = self._run(self._api.http.post(path, json={"model": MODEL, **fields}))
        assert response.status_code == 200, response.text
        return response.json()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)


@contextlib.contextmanager
def scripted_gateway(family: Family) -> Iterator[ScriptedGateway]:
    """Runs a gateway in a thread of its own. Where no network can be made, it is in that of all."""
    running: Future[ScriptedGateway] = Future()
    over = threading.Event()
    thread = threading.Thread(target=_run, args=(family, running, over))
    thread.start()
    try:
        yield running.result(60)
    finally:
        over.set()
        thread.join()


def _run(family: Family, running: "Future[ScriptedGateway]", over: threading.Event) -> None:
    try:
        with _network() as enter:
            asyncio.run(_serve(family, enter, running, over))
    except BaseException as error:
        if running.done():
            raise
        running.set_exception(error)


def _network() -> AbstractContextManager[Callable[[], None] | None]:
    return private_network() if has(NAMESPACES) and shutil.which("ip") else nullcontext()


async def _serve(
    family: Family, enter: Callable[[], None] | None, running: "Future[ScriptedGateway]", over: threading.Event
) -> None:
    options: dict[str, Any] = {
        "template": family.source,
        "response_template": family.response_template,
        "response_store": MemoryResponseStore(KEPT_S, time.monotonic),
        "aliases": ALIASES,
    }
    async with running_api(**options) as api:
        model = ScriptedModel(family, api.tokenizer)
        api.generator.max_model_len, api.generator.answer = MAX_MODEL_LEN, model.answer
        running.set_result(ScriptedGateway(api.base_url, model, enter, api, asyncio.get_running_loop()))
        await asyncio.to_thread(over.wait)


async def _num_without_route() -> int:
    """Counts packets and connections of this thread's network that had no route."""
    counters = Path("/proc/thread-self/net")
    ip = [line.split() for line in (counters / "snmp").read_text().splitlines() if line.startswith("Ip:")]
    version_4 = dict(zip(*ip, strict=True))
    version_6 = dict(line.split() for line in (counters / "snmp6").read_text().splitlines())
    return int(version_4["OutNoRoutes"]) + int(version_6["Ip6OutNoRoutes"])
