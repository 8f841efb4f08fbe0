"""Requests as workers would be sent them, in JSON values under vLLM's names: for endpoints that generate nothing."""

from typing import Any

from pydantic import RootModel

from services.gateway.api.dialects.prompts import Prompt
from services.gateway.api.requests.schema import CommonRequest
from services.gateway.http.operation import Described
from services.protocol.capsule import Capsule


class RenderedParams(Described):
    """The sampling parameters of a prompt, under vLLM's names."""

    n: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: list[str]
    stop_token_ids: list[int]
    bad_words: list[str]
    ignore_eos: bool
    max_tokens: int
    min_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    allowed_token_ids: list[int] | None
    logprob_token_ids: list[int] | None
    include_stop_str_in_output: bool
    spaces_between_special_tokens: bool
    skip_special_tokens: bool
    logit_bias: dict[str, float] | None
    structured_outputs: dict[str, Any] | None


class Rendered(Described):
    """A prompt as a worker would be sent it, in the form of a request to vLLM's `/inference/v1/generate`.

    `token_offsets`, where a request to render a text or a chat asks for them: the place of each token in the prompt's
    text, from its first character up to before the last, in code points.
    """

    request_id: str
    token_ids: list[int]
    token_offsets: list[tuple[int, int]] | None
    sampling_params: RenderedParams
    model: str
    stream: bool
    stream_options: dict[str, bool] | None


class RenderedList(RootModel[list[Rendered]]):
    """One entry for each prompt."""


def rendered(request: CommonRequest, prompt: Prompt, capsule: Capsule, request_id: str, model: str) -> dict[str, Any]:
    """Returns what a worker would be sent for a prompt of a request."""
    return {
        "request_id": request_id,
        "token_ids": capsule.token_ids,
        "token_offsets": prompt.token_offsets,
        "sampling_params": _sampling_params(request, capsule),
        "model": model,
        "stream": bool(request.stream),
        "stream_options": _stream_options(request) if request.stream else None,
    }


def _stream_options(request: CommonRequest) -> dict[str, bool]:
    return {"include_usage": request.include_usage, "continuous_usage_stats": request.continuous_usage}


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
