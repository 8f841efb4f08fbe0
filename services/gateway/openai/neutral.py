"""Fields that OpenAI or vLLM know and this server does not act on, with the values that ask for nothing."""

from services.gateway.api.validation import Neutral

_NOTHING: tuple[object, ...] = ()

# Fields of both endpoints.
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
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": _NOTHING,
    "prediction": _NOTHING,
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "prompt_logprobs": _NOTHING,
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
    "background": (False,),
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

EMBEDDINGS_NEUTRAL: Neutral = {
    "cache_salt": _NOTHING,
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "messages": _NOTHING,
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "request_id": _NOTHING,
    "softmax": _NOTHING,
    "use_activation": (True,),
}
