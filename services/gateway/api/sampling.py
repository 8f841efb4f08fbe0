"""What a request says about sampling, with every default filled in and every pair of fields that must agree checked."""

import secrets
import struct
from collections.abc import Iterable
from hashlib import blake2b
from typing import TypeVar

from services.gateway.api.errors import ApiError, invalid
from services.gateway.api.schema import ChatRequest, CommonRequest, CompletionRequest
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.model_files.info import GenerationDefaults
from services.protocol.sampling import SamplingParams

Number = TypeVar("Number", int, float)

_COMPLETION_MAX_TOKENS = 16
_SEED_MASK = 2**64 - 1


def check_combinations(request: CommonRequest) -> None:
    """Fields that only make sense together. Raises ApiError."""
    if request.stream_options is not None and not request.stream:
        raise invalid("'stream_options' is only allowed when 'stream' is true.", "stream_options")
    if isinstance(request, ChatRequest):
        _check_chat(request)
    if isinstance(request, CompletionRequest) and request.stream and request.prompt_logprobs is not None:
        raise invalid("'prompt_logprobs' is only allowed when 'stream' is false.", "prompt_logprobs")


def _check_chat(request: ChatRequest) -> None:
    if request.top_logprobs is not None and request.top_logprobs > 0 and not request.logprobs:
        raise invalid("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise invalid("'max_tokens' and 'max_completion_tokens' differ; send one of them.", "max_tokens")
    if request.continue_final_message:
        if request.add_generation_prompt:
            raise invalid("It cannot be combined with 'add_generation_prompt'.", "continue_final_message")
        if request.messages[-1].role != "assistant":
            raise invalid("The last message must be the assistant's to be continued.", "continue_final_message")


def resolve_sampling(
    request: CommonRequest,
    defaults: GenerationDefaults,
    num_prompt: int,
    max_model_len: int,
    vocab_size: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> SamplingParams:
    """Parameters of the first choice for a prompt of `num_prompt` tokens.

    bad_words: the request's, as tokens. Raises ApiError where the prompt does not fit the context, or a token is not in
    the vocabulary.
    """
    max_tokens = _max_tokens(request, num_prompt, max_model_len)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid(f"'min_tokens' must be at most the maximum of {max_tokens} tokens.", "min_tokens")
    stop_token_ids = tuple(request.stop_token_ids or ())
    logit_bias = tuple((request.logit_bias or {}).items())
    for name, tokens in (("stop_token_ids", stop_token_ids), ("logit_bias", [token for token, _ in logit_bias])):
        if any(token >= vocab_size for token in tokens):
            raise invalid(f"Token ids must be below {vocab_size}.", name)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_first(request.temperature, defaults.temperature, 1.0),
        top_p=_first(request.top_p, defaults.top_p, 1.0),
        top_k=_first(request.top_k, defaults.top_k, -1) or -1,
        min_p=_first(request.min_p, defaults.min_p, 0.0),
        seed=secrets.randbits(64) if request.seed is None else request.seed & _SEED_MASK,
        min_tokens=min_tokens,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=stop_token_ids,
        num_logprobs=_num_logprobs(request),
        num_prompt_logprobs=_num_prompt_logprobs(request),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=logit_bias,
        bad_words=bad_words,
    )


def seed_of_choice(seed: int, index: int) -> int:
    """Unsigned, 64 bits: the seed of the choice with this number; the first one has the request's own."""
    if index == 0:
        return seed
    return int.from_bytes(blake2b(struct.pack("<QI", seed, index), digest_size=8).digest(), "little")


def bad_word_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word as it is written at the start of a text and after a space.

    A model can still spell a word in other tokens.
    """
    written = [text for word in words for text in (word, " " + word)]
    encoded = (tuple(tokenizer.backend.encode(text, add_special_tokens=False).ids) for text in written)
    return tuple(dict.fromkeys(tokens for tokens in encoded if tokens))


def _first(*values: Number | None) -> Number:
    return next(value for value in values if value is not None)


def _num_logprobs(request: CommonRequest) -> int | None:
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    assert isinstance(request, CompletionRequest)
    return request.logprobs


def _num_prompt_logprobs(request: CommonRequest) -> int | None:
    if not isinstance(request, CompletionRequest):
        return None
    asked = [request.prompt_logprobs, request.logprobs if request.echo else None]
    return max((width for width in asked if width is not None), default=None)


def _max_tokens(request: CommonRequest, num_prompt: int, max_model_len: int) -> int:
    chat = isinstance(request, ChatRequest)
    asked = request.max_completion_tokens if isinstance(request, ChatRequest) else None
    asked = request.max_tokens if asked is None else asked
    room = max_model_len - num_prompt
    prompt_param = "messages" if chat else "prompt"
    if room < 1:
        raise _too_long(max_model_len, f"your {prompt_param} have {num_prompt} tokens", prompt_param)
    if asked is None:
        return room if chat else min(room, _COMPLETION_MAX_TOKENS)
    if asked > room:
        parts = f"{num_prompt} in the {prompt_param}, {asked} in the completion"
        raise _too_long(max_model_len, f"you requested {num_prompt + asked} tokens ({parts})", prompt_param)
    return asked


def _too_long(max_model_len: int, found: str, param: str) -> ApiError:
    message = f"This model's maximum context length is {max_model_len} tokens. However, {found}."
    return invalid(message, param, "context_length_exceeded")
