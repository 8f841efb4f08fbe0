"""The sampling parameters of a request, with every default filled in."""

import secrets
import struct
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import TypeVar

from services.gateway.api.errors import invalid
from services.gateway.api.requests.schema import CommonRequest
from services.gateway.api.requests.text_limits import too_long
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.model_files.info import GenerationDefaults
from services.protocol.sampling import SamplingParams

Number = TypeVar("Number", int, float)

_SEED_MASK = 2**64 - 1


def resolve_sampling(
    request: CommonRequest,
    defaults: GenerationDefaults,
    num_prompt: int,
    max_model_len: int,
    vocab_size: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
    grammar: str = "",
) -> SamplingParams:
    """Returns the parameters of the first choice for a prompt of `num_prompt` tokens.

    bad_words: the request's, as tokens; grammar: of its answer, see SamplingParams. Raises ApiError where the prompt
    does not fit the context, or a token is not in the vocabulary.
    """
    max_tokens = _max_tokens(request, num_prompt, max_model_len)
    stop_token_ids = tuple(request.stop_token_ids or ())
    logit_bias = tuple((request.logit_bias or {}).items())
    allowed = tuple(dict.fromkeys(request.allowed_token_ids or ()))
    alternatives = tuple(dict.fromkeys(request.logprob_token_ids or ()))
    for name, tokens in (
        ("stop_token_ids", stop_token_ids),
        ("logit_bias", [token for token, _ in logit_bias]),
        ("allowed_token_ids", allowed),
        ("logprob_token_ids", alternatives),
    ):
        if (unknown := next((token for token in tokens if token >= vocab_size), None)) is not None:
            raise invalid(f"Invalid '{name}': token ids must be below {vocab_size}, and {unknown} is not.", name)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=_first(request.temperature, defaults.temperature, 1.0),
        top_p=_first(request.top_p, defaults.top_p, 1.0),
        top_k=_first(request.top_k, defaults.top_k, -1) or -1,
        min_p=_first(request.min_p, defaults.min_p, 0.0),
        seed=secrets.randbits(64) if request.seed is None else request.seed & _SEED_MASK,
        min_tokens=request.min_tokens or 0,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=stop_token_ids,
        num_logprobs=len(alternatives) or request.num_logprobs,
        num_prompt_logprobs=request.num_prompt_logprobs,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=logit_bias,
        bad_words=bad_words,
        grammar=grammar,
        allowed_token_ids=allowed,
        logprob_token_ids=alternatives,
    )
    banned = sampling.banned_token_ids
    if banned and all(token in banned for token in allowed or range(vocab_size)):
        param = "allowed_token_ids" if allowed else "logit_bias" if logit_bias else "bad_words"
        raise invalid("'logit_bias' and 'bad_words' leave no token that may be generated.", param, "no_token_left")
    return sampling


def seed_of_choice(seed: int, index: int) -> int:
    """The seed of the choice with this number, 64 bits, unsigned. The first choice has the request's own."""
    if index == 0:
        return seed
    return int.from_bytes(blake2b(struct.pack("<QI", seed, index), digest_size=8).digest(), "little")


def for_prompt(sampling: SamplingParams, request: CommonRequest, num_prompt: int, max_model_len: int) -> SamplingParams:
    """Returns a request's resolved parameters for the first choice of another prompt, of `num_prompt` tokens.

    Raises ApiError where that prompt does not fit the context.
    """
    seed = secrets.randbits(64) if request.seed is None else sampling.seed
    return replace(sampling, max_tokens=_max_tokens(request, num_prompt, max_model_len), seed=seed)


def bad_word_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of each word as written at the start of a text and after a space.

    A model can still spell a word in other tokens. Releases the interpreter lock.
    """
    written = [text for word in words for text in (word, " " + word)]
    encodings = tokenizer.backend.encode_batch_fast(written, add_special_tokens=False)
    encoded = (tuple(encoding.ids) for encoding in encodings)
    return tuple(dict.fromkeys(tokens for tokens in encoded if tokens))


def _first(*values: Number | None) -> Number:
    return next(value for value in values if value is not None)


def _max_tokens(request: CommonRequest, num_prompt: int, max_model_len: int) -> int:
    asked, param, room = request.asked_tokens, request.prompt_param, max_model_len - num_prompt
    if room < 1:
        raise too_long(max_model_len, f"your {param} have {num_prompt} tokens", param)
    if asked is not None and asked > room:
        if not request.clamps_tokens:
            parts = f"{num_prompt} in the {param}, {asked} in the completion"
            raise too_long(max_model_len, f"you requested {num_prompt + asked} tokens ({parts})", param)
        asked = room
    max_tokens = request.default_tokens(room) if asked is None else asked
    if request.only_prompt:
        max_tokens = 1  # which the answer leaves out
    if (request.min_tokens or 0) > max_tokens:
        raise invalid(f"'min_tokens' must be at most the maximum of {max_tokens} tokens.", "min_tokens")
    return max_tokens
