"""Fields that OpenAI or vLLM know and this server does not act on, with the values that ask for nothing."""

from services.gateway.api.validation import Neutral

_NOTHING: tuple[object, ...] = ()

# Fields of both endpoints.
_COMMON: Neutral = {
    "guided_choice": _NOTHING,
    "guided_decoding_backend": _NOTHING,
    "guided_grammar": _NOTHING,
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "guided_whitespace_pattern": _NOTHING,
    "length_penalty": (1, 1.0),
    "mm_payload": ("tensors",),
    "repetition_detection": _NOTHING,
    "return_mm_kwargs": _NOTHING,
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "thinking_token_budget": _NOTHING,
    "use_beam_search": (False,),
    "watermarking": (False,),
}

CHAT_NEUTRAL: Neutral = {
    **_COMMON,
    "audio": _NOTHING,
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
