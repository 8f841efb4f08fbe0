"""Fields that OpenAI or vLLM know and this server does not act on.

A client may send them as long as they ask for nothing: null, or one of the values listed here. Anything else is
refused by name, since nothing is accepted and ignored.
"""

from collections.abc import Mapping
from typing import Any

from services.gateway.api.errors import ApiError, invalid, unsupported

Neutral = Mapping[str, tuple[object, ...]]

_NOTHING: tuple[object, ...] = ()

# Of both endpoints. null is neutral everywhere.
_COMMON: Neutral = {
    "allowed_token_ids": _NOTHING,
    "cache_salt": _NOTHING,
    "guided_choice": _NOTHING,
    "guided_grammar": _NOTHING,
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "logprob_token_ids": _NOTHING,
    "mm_payload": ("tensors",),
    "priority": (0,),
    "repetition_detection": _NOTHING,
    "request_id": _NOTHING,
    "return_mm_kwargs": _NOTHING,
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "session_id": _NOTHING,
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "structured_outputs": _NOTHING,
    "thinking_token_budget": _NOTHING,
    "truncate_prompt_tokens": _NOTHING,
    "truncation_side": _NOTHING,
    "use_beam_search": (False,),
    "watermarking": (False,),
}

CHAT_NEUTRAL: Neutral = {
    **_COMMON,
    "audio": _NOTHING,
    "chat_template": _NOTHING,
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": _NOTHING,
    "include_reasoning": (True,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": _NOTHING,
    "parallel_tool_calls": (True, False),
    "prediction": _NOTHING,
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "prompt_logprobs": _NOTHING,
    "reasoning_effort": _NOTHING,
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": _NOTHING,
    "verbosity": ("medium",),
    "web_search_options": _NOTHING,
}

COMPLETIONS_NEUTRAL: Neutral = {
    **_COMMON,
    "best_of": (1,),
    "prompt_embeds": _NOTHING,
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
}

# Not for clients, whatever they hold: between gateways and workers elsewhere. Only null passes.
_INTERNAL = ("ec_transfer_params", "kv_transfer_params", "vllm_xargs")


def without_neutral(body: Mapping[str, Any], table: Neutral) -> dict[str, Any]:
    """The fields of `body` that ask for something. Raises ApiError for one that asks for what is not supported."""
    rest: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            if name not in table and name not in _INTERNAL:
                rest[name] = value
        elif name in table:
            if not any(type(value) is type(neutral) and value == neutral for neutral in table[name]):
                raise _refusal(name, table[name])
        else:
            rest[name] = value
    return rest


def unknown_field(param: str) -> ApiError:
    """400: a field nobody knows."""
    return invalid(f"Unrecognized request argument supplied: {param}", param, "unknown_parameter")


def _refusal(name: str, neutral: tuple[object, ...]) -> ApiError:
    if not neutral:
        return unsupported(name)
    allowed = " or ".join(repr(value) if not isinstance(value, bool) else str(value).lower() for value in neutral)
    return unsupported(name, f"'{name}' is not supported by this server; leave it out or set it to {allowed}.")
