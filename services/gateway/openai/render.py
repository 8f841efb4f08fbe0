"""vLLM's endpoints that show what workers would be sent: a chat or a prompt as token ids, and nothing generated.

They take what the endpoint itself takes, and refuse what it refuses.
"""

from typing import Any, Generic

import orjson

from services.gateway.api.request_runner import RequestRunner
from services.gateway.api.schema import CommonRequest, Request
from services.gateway.api.validation import Neutral, ignored_fields
from services.gateway.http.exchange import Exchange
from services.gateway.http.limits import Limits
from services.protocol.capsule import Capsule


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
        request = await self._runner.parse(body, self._neutral)
        exchange.take_request_id(request.request_id)
        ignored = self._runner.dialect.ignored_fields(request)
        exchange.record.note_ignored_fields(ignored_fields(ignored, self._limits.strict_fields))
        capsules = (await self._runner.capsules(request, exchange.record, exchange.caller))[:: request.n or 1]
        answer_id = f"{'cmpl' if self._several else 'chatcmpl'}-{exchange.record.request_id}"
        ids = [answer_id] if len(capsules) == 1 else [f"{answer_id}-{number}" for number in range(len(capsules))]
        listed = [self._describe(request, capsule, own_id) for capsule, own_id in zip(capsules, ids, strict=True)]
        answer = listed if self._several else listed[0]
        await exchange.respond(200, await self._runner.side.run(orjson.dumps, answer, None, orjson.OPT_SERIALIZE_NUMPY))

    def _describe(self, request: Request, capsule: Capsule, request_id: str) -> dict[str, Any]:
        return {
            "request_id": request_id,
            "token_ids": capsule.token_ids,
            "sampling_params": _sampling_params(request, capsule),
            "model": self._runner.model.name,
            "stream": bool(request.stream),
            "stream_options": {"include_usage": request.include_usage} if request.stream else None,
        }


def _sampling_params(request: CommonRequest, capsule: Capsule) -> dict[str, Any]:
    """The parameters under vLLM's names, with defaults filled in."""
    sampling = capsule.sampling
    return {
        "n": request.n or 1,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": request.seed,
        "stop": request.stop or [],
        "stop_token_ids": sampling.stop_token_ids,
        "bad_words": request.bad_words or [],
        "ignore_eos": sampling.ignore_eos,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "logprobs": sampling.num_logprobs,
        "prompt_logprobs": sampling.num_prompt_logprobs,
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "logprob_token_ids": list(sampling.logprob_token_ids) or None,
        "include_stop_str_in_output": bool(request.include_stop_str_in_output),
        "spaces_between_special_tokens": request.spaces_between_special_tokens is not False,
        "skip_special_tokens": request.skip_special_tokens is not False,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias} or None,
        "structured_outputs": _structured_outputs(request),
    }


def _structured_outputs(request: CommonRequest) -> dict[str, Any] | None:
    """The form of the answer, in vLLM's field whichever field asked for it."""
    wanted = request.response_format
    if request.structured_outputs is not None:
        return request.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "structural_tag":
        return {"structural_tag": wanted.model_dump(by_alias=True, exclude_none=True)}
    schema = None if wanted.json_schema is None else wanted.json_schema.json_schema
    return {"json_object": True} if schema is None else {"json": schema}
