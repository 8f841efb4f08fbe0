"""vLLM's endpoints that show what workers would be sent: a chat or a prompt as token ids, and nothing generated.

They take what the endpoint itself takes, and refuse what it refuses. Beside that they say, where they are asked, at
which characters of the prompt's text each token is.
"""

from typing import Generic

import orjson

from services.gateway.api.dialects.completions import CompletionRequest
from services.gateway.api.request_runner import RequestRunner
from services.gateway.api.requests.chat import ChatRequest
from services.gateway.api.requests.schema import Request
from services.gateway.api.requests.validation import Neutral
from services.gateway.api.served_models import Resolved
from services.gateway.http.exchange import Exchange
from services.gateway.http.limits import Limits
from services.gateway.http.rendered import rendered
from services.gateway.openai.neutral import CHAT_NEUTRAL, COMPLETIONS_NEUTRAL

_OFFSETS = "return_token_offsets"

RENDER_CHAT_NEUTRAL: Neutral = {name: values for name, values in CHAT_NEUTRAL.items() if name != _OFFSETS}
RENDER_COMPLETIONS_NEUTRAL: Neutral = {name: values for name, values in COMPLETIONS_NEUTRAL.items() if name != _OFFSETS}


class RenderChatRequest(ChatRequest):
    """The body of /v1/chat/completions/render."""

    return_token_offsets: bool | None = None

    @property
    def wants_token_offsets(self) -> bool:
        """See CommonRequest."""
        return bool(self.return_token_offsets)


class RenderCompletionRequest(CompletionRequest):
    """The body of /v1/completions/render."""

    return_token_offsets: bool | None = None

    @property
    def wants_token_offsets(self) -> bool:
        """See CommonRequest."""
        return bool(self.return_token_offsets)


class RenderEndpoint(Generic[Request]):
    """POST /v1/chat/completions/render, POST /v1/completions/render."""

    def __init__(
        self, runner: RequestRunner[Request], kind: type[Request], neutral: Neutral, limits: Limits, *, several: bool
    ) -> None:
        """kind: of the body. several: a request may have several prompts, and the answer is a list."""
        self._runner = runner
        self._kind = kind
        self._neutral = neutral
        self._limits = limits
        self._several = several

    async def __call__(self, exchange: Exchange) -> None:
        """Sends the token ids and the sampling parameters of each prompt. Raises ApiError, ClientGone."""
        body = await exchange.read_json(self._limits.max_body_bytes)
        asked, ignored = await self._runner.parse(body, self._neutral, self._limits.strict_fields, self._kind)
        exchange.take_request_id(asked.request.request_id)
        exchange.record.note_ignored_fields(ignored)
        request = self._limits.defaults.applied(asked.request)
        made = await self._runner.rendered(Resolved(request, asked.model), exchange.record, exchange.caller)
        answer_id = f"{'cmpl' if self._several else 'chatcmpl'}-{exchange.record.request_id}"
        ids = [answer_id] if len(made) == 1 else [f"{answer_id}-{number}" for number in range(len(made))]
        listed = [rendered(request, *each, own_id, asked.model.name) for each, own_id in zip(made, ids, strict=True)]
        answer = listed if self._several else listed[0]
        await exchange.respond(200, await self._runner.side.run(orjson.dumps, answer, None, orjson.OPT_SERIALIZE_NUMPY))
