"""Fields that OpenAI or vLLM know and this server does not act on, with the values that ask for nothing.

Those that are hints, see `hints`, may have any other value too, which is named; the rest are demands, and refused.
"""

from services.gateway.api.requests.validation import Neutral

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
    "use_beam_search": (False,),
    "watermarking": (False,),
}

CHAT_NEUTRAL: Neutral = {
    **_COMMON,
    "audio": _NOTHING,
    "function_call": ("none", "auto"),
    "functions": _NOTHING,
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": _NOTHING,
    "prediction": _NOTHING,
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "service_tier": ("auto", "default"),
    "store": (False,),
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
    "thinking_token_budget": _NOTHING,
}

RESPONSES_NEUTRAL: Neutral = {
    **_COMMON,
    "access_programs": _NOTHING,
    "context_management": ([],),
    "conversation": _NOTHING,
    "enable_response_messages": (False,),
    "image": _NOTHING,
    "mm_processor_kwargs": ({},),
    "moderation": _NOTHING,
    "previous_input_messages": _NOTHING,
    "previous_response": _NOTHING,
    "prompt": _NOTHING,
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "service_tier": ("auto", "default"),
}

SCORES_NEUTRAL: Neutral = {
    "activation": (True,),
    "chat_template": _NOTHING,
    "chat_template_kwargs": ({},),
    "max_tokens_per_doc": _NOTHING,
    "mm_processor_kwargs": ({},),
    "softmax": (True,),
}

EMBEDDINGS_NEUTRAL: Neutral = {
    "messages": _NOTHING,
    "mm_processor_kwargs": ({},),
    "softmax": _NOTHING,
    "use_activation": (True,),
}
