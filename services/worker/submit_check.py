"""The check of a submit where it enters the worker: the engine's arrays rely on what is checked here.

A correct gateway sends nothing that is refused here. The engine thread does not survive an error, so a value that no
array can have, or that asks for memory without bound, must not reach it.
"""

import math
from itertools import chain

from services.config.hosts import AddressError, split_address
from services.protocol.messages import MAX_HANDLE, Submit, TakeFrom
from services.protocol.sampling import (
    FEW_ALTERNATIVES,
    MAX_ALTERNATIVES,
    MAX_GRAMMAR,
    MAX_REPETITION,
    MAX_TEMPERATURE,
    MAX_TOP_K,
    MIN_REPETITION,
    SamplingParams,
)

_MAX_LENGTH = 2**31 - 1  # of a sequence: an int32
_MAX_LIST = 4096  # stop tokens, biases or bad words; gateways allow 1,024 or fewer
_MAX_BAD_TOKENS = 65_536  # of all bad words
_MAX_SALT = 1024  # characters; gateways allow 128
_MAX_EDIT = 1e6  # of a logit: in float32 sums with it are finite


def what_is_wrong(submit: Submit, vocab_size: int) -> str | None:
    """Returns what no correct gateway sends, for a person; None: the submit may go to the engine."""
    capsule, sampling = submit.capsule, submit.capsule.sampling
    tokens = capsule.token_ids
    if not 1 <= capsule.num_prompt <= len(tokens):
        return "a prompt of no tokens, or of more than there are"
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        return "a token id outside the vocabulary"
    if not 0 < submit.timeout_s < math.inf:
        return "a timeout that is no time"
    if isinstance(submit.handoff, TakeFrom) and not _is_address(submit.handoff.address):
        return "a producer at no address"
    if len(capsule.cache_salt) > _MAX_SALT:
        return "too large a salt"
    if capsule.pooling is not None:
        return _wrong_embedding(submit)
    if capsule.second_text:
        return "a second text in a prompt that is not pooled"
    if capsule.max_len <= len(tokens):
        return "no token left to generate"
    if sampling.min_tokens > sampling.max_tokens or capsule.num_prompt + sampling.min_tokens > _MAX_LENGTH:
        return "more tokens at least than at most"
    if submit.last_handle > MAX_HANDLE:
        return "more choices than there are handles"
    if len(sampling.grammar) > MAX_GRAMMAR:
        return "too large a grammar"
    if capsule.many_alternatives * max(1, len(submit.seeds)) > MAX_ALTERNATIVES:
        return "more alternatives than an answer may have"
    return _wrong_choice(sampling, vocab_size) or _wrong_lists(sampling, vocab_size)


def _is_address(address: str) -> bool:
    try:
        split_address(address)
    except AddressError:
        return False
    return True


def _wrong_embedding(submit: Submit) -> str | None:
    """Checks a submit of a prompt that is to be embedded, which has no sampling parameters."""
    capsule = submit.capsule
    if capsule.num_prompt != len(capsule.token_ids) or capsule.sampling != SamplingParams(max_tokens=0):
        return "an embedding of generated tokens, or with sampling parameters"
    if submit.handoff is not None or submit.seeds:
        return "an embedding with a handoff, or in several choices"
    if capsule.second_text >= capsule.num_prompt:
        return "a second text without a token"
    return None


def _wrong_choice(sampling: SamplingParams, vocab_size: int) -> str | None:
    """Checks the parameters by which a token is chosen."""
    in_range = (
        0 <= sampling.temperature <= MAX_TEMPERATURE,
        0 < sampling.top_p <= 1,
        0 <= sampling.min_p <= 1,
        sampling.top_k == -1 or 1 <= sampling.top_k <= MAX_TOP_K,
        MIN_REPETITION <= sampling.repetition_penalty <= MAX_REPETITION,
        abs(sampling.frequency_penalty) <= _MAX_EDIT,
        abs(sampling.presence_penalty) <= _MAX_EDIT,
        (sampling.num_logprobs or 0) <= max(vocab_size, FEW_ALTERNATIVES),
        (sampling.num_prompt_logprobs or 0) <= max(vocab_size, FEW_ALTERNATIVES),
    )
    return None if all(in_range) else "a sampling parameter out of range"


def _wrong_lists(sampling: SamplingParams, vocab_size: int) -> str | None:
    """Checks stop tokens, biases and bad words."""
    if len(sampling.logprob_token_ids) > FEW_ALTERNATIVES or len(sampling.allowed_token_ids) > vocab_size:
        return "too many alternatives or allowed tokens"
    if len(set(sampling.logprob_token_ids)) < len(sampling.logprob_token_ids):
        return "an alternative that is named twice"
    if sampling.logprob_token_ids and len(sampling.logprob_token_ids) != sampling.num_logprobs:
        return "another number of alternatives than are named"
    if max(len(sampling.stop_token_ids), len(sampling.logit_bias), len(sampling.bad_words)) > _MAX_LIST:
        return "too many stop tokens, biases or bad words"
    if sum(map(len, sampling.bad_words)) > _MAX_BAD_TOKENS or not all(sampling.bad_words):
        return "a bad word without tokens, or too many of them"
    if not all(abs(value) <= _MAX_EDIT for _, value in sampling.logit_bias):
        return "a logit bias that is no number"
    named = chain(
        sampling.stop_token_ids,
        (token for token, _ in sampling.logit_bias),
        sampling.allowed_token_ids,
        sampling.logprob_token_ids,
        *sampling.bad_words,
    )
    if any(not 0 <= token < vocab_size for token in named):
        return "a stop token, bias, bad word, allowed token or alternative outside the vocabulary"
    return None
