"""The proxy of vLLM's own pair: pair_proxy.py PORT PREFILL_PORT DECODE_PORT. Runs in vLLM's environment.

A request goes to prefill for one token; the answer names the blocks, which go with the request to decode, whose answer
is the client's. That is the protocol of vLLM's example; this one is on aiohttp and uvloop, since it shares the cores
with the servers that it is to show at their best.
"""

import sys
from collections.abc import AsyncIterator

import uvloop
from aiohttp import ClientResponse, ClientSession, ClientTimeout, TCPConnector, web

_ASK_FOR_BLOCKS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_ONLY_FOR_DECODE = {"stream_options", "min_tokens"}  # refused beside max_tokens=1 or without a stream
_MAX_BODY_BYTES = 64 << 20


class Proxy:
    """Two servers behind one port."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill = prefill
        self._decode = decode

    async def open(self, app: web.Application) -> AsyncIterator[None]:
        """Keeps connections to the servers while the app runs."""
        unlimited = TCPConnector(limit=0)
        async with ClientSession(timeout=ClientTimeout(total=None), connector=unlimited) as self._session:
            yield

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Sends a completion to prefill, then to decode, and answers with what decode says."""
        body = await request.json()
        first = {key: value for key, value in body.items() if key not in _ONLY_FOR_DECODE}
        first |= {"stream": False, "max_tokens": 1, "kv_transfer_params": _ASK_FOR_BLOCKS}
        async with self._session.post(self._prefill + request.path, json=first) as answer:
            if answer.status != 200:
                return await _relay(request, answer)
            body["kv_transfer_params"] = (await answer.json())["kv_transfer_params"]
        async with self._session.post(self._decode + request.path, json=body) as answer:
            return await _relay(request, answer)

    async def models(self, request: web.Request) -> web.StreamResponse:
        """Answers with the models that decode names."""
        async with self._session.get(self._decode + request.path) as answer:
            return await _relay(request, answer)


async def _relay(request: web.Request, answer: ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
    await response.prepare(request)
    async for chunk in answer.content.iter_any():
        await response.write(chunk)
    await response.write_eof()
    return response


def main() -> None:
    """Serves until it is told to end."""
    port, prefill, decode = sys.argv[1:]
    proxy = Proxy(f"http://127.0.0.1:{prefill}", f"http://127.0.0.1:{decode}")
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.cleanup_ctx.append(proxy.open)
    app.add_routes([web.get("/v1/models", proxy.models), web.post("/v1/completions", proxy.complete)])
    web.run_app(app, host="127.0.0.1", port=int(port), access_log=None, print=None, loop=uvloop.new_event_loop())


if __name__ == "__main__":
    main()
