"""The API side over a scripted generator, HTTP and gRPC, in a thread: for clients that block while they wait."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from tests.gateway.running_api import running_api


@contextlib.contextmanager
def api_in_thread(**options: Any) -> Iterator[tuple[int, int]]:
    """A gateway's ports for HTTP and gRPC. It ends with the context. options: of running_api."""
    ports: Future[tuple[int, int]] = Future()
    loop = asyncio.new_event_loop()
    over = asyncio.Event()

    async def serve() -> None:
        async with running_api(**options) as api:
            api.generator.script.as_asked = True
            ports.set_result((api.port, await api.start_grpc()))
            await over.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as error:
            if not ports.done():
                ports.set_exception(error)
            raise

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ports.result(60)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()
