"""vLLM's endpoints that show what workers would be sent: a chat or a prompt as token ids, and nothing generated.

They take what the endpoint itself takes, and refuse what it refuses.
"""

from typing import Generic

import orjson

from services.gateway.api.request_runner import RequestRunner
from services.gateway.api.requests.schema import Request
from services.gateway.api.requests.validation import Neutral
from services.gateway.http.exchange import Exchange
from services.gateway.http.limits import Limits
from services.gateway.http.rendered import rendered


class RenderEndpoint(Generic[Request]):
    """POST /v1/chat/completions/render, POST /v1/completions/render."""

    def __init__(self, runner: RequestRunner[Request], neutral: Neutral, limits: Limits, *, several: bool) -> None:
        """several: a request may have several prompts, and the answer is a list."""
        self._runner = runner
        self._neutral = neutral
        self._limits = limits
        self._several = several

    async def __call__(self, exchange: Exchange) -> None:
        """Sends the token ids and the sampling parameters of each prompt. Raises ApiError, ClientGone."""
        body = await exchange.read_json(self._limits.max_body_bytes)
        asked, ignored = await self._runner.parse(body, self._neutral, self._limits.strict_fields)
        exchange.take_request_id(asked.request_id)
        exchange.record.note_ignored_fields(ignored)
        request = self._limits.defaults.applied(asked)
        capsules = (await self._runner.capsules(request, exchange.record, exchange.caller))[:: request.n or 1]
        answer_id = f"{'cmpl' if self._several else 'chatcmpl'}-{exchange.record.request_id}"
        ids = [answer_id] if len(capsules) == 1 else [f"{answer_id}-{number}" for number in range(len(capsules))]
        model = self._runner.model.name
        listed = [rendered(request, capsule, own_id, model) for capsule, own_id in zip(capsules, ids, strict=True)]
        answer = listed if self._several else listed[0]
        await exchange.respond(200, await self._runner.side.run(orjson.dumps, answer, None, orjson.OPT_SERIALIZE_NUMPY))
