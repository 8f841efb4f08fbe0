"""Capsules and sampling parameters."""

from protos import sampling_pb2
from services.config import Pooling
from services.protocol.capsule import Capsule
from services.protocol.sampling import SamplingParams
from services.protocol.wire.arrays import array_bytes, parse_array
from services.protocol.wire.errors import WireError
from services.protocol.wire.fields import SharedFields

_SHARED = SharedFields(
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "grammar",
)


def pack_capsule(capsule: Capsule) -> sampling_pb2.Capsule:
    """Packs a capsule."""
    assert not capsule.adapter, "no worker can be told of an adapter"
    assert not capsule.media, "no worker can be told of media"
    return sampling_pb2.Capsule(
        token_ids=array_bytes(capsule.token_ids, "<i4"),
        num_prompt=capsule.num_prompt,
        sampling=_pack_sampling(capsule.sampling),
        cache_salt=capsule.cache_salt,
        pooling="" if capsule.pooling is None else capsule.pooling.value,
        priority=capsule.priority,
        second_text=capsule.second_text,
    )


def parse_capsule(packed: sampling_pb2.Capsule) -> Capsule:
    """Parses a capsule. Raises WireError."""
    token_ids = parse_array(packed.token_ids, "<i4", "token_ids")
    if not 1 <= packed.num_prompt <= len(token_ids):
        raise WireError(f"{packed.num_prompt} prompt tokens among {len(token_ids)}")
    return Capsule(
        token_ids=token_ids,
        num_prompt=packed.num_prompt,
        sampling=_parse_sampling(packed.sampling),
        cache_salt=packed.cache_salt,
        priority=packed.priority,
        pooling=_parse_pooling(packed.pooling) if packed.pooling else None,
        second_text=packed.second_text,
    )


def _parse_pooling(name: str) -> Pooling:
    try:
        return Pooling(name)
    except ValueError as error:
        raise WireError(f"pooling {name[:20]!r}") from error


def _pack_sampling(sampling: SamplingParams) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(
        **_SHARED.of(sampling),
        stop_token_ids=sampling.stop_token_ids,
        num_logprobs=sampling.num_logprobs,
        num_prompt_logprobs=sampling.num_prompt_logprobs,
        repetition_penalty=sampling.repetition_penalty,
        bias_token_ids=[token for token, _ in sampling.logit_bias],
        bias_values=[value for _, value in sampling.logit_bias],
        bad_words=[sampling_pb2.BadWord(token_ids=word) for word in sampling.bad_words],
        allowed_token_ids=sampling.allowed_token_ids,
        logprob_token_ids=sampling.logprob_token_ids,
    )


def _parse_sampling(packed: sampling_pb2.SamplingParams) -> SamplingParams:
    if len(packed.bias_token_ids) != len(packed.bias_values):
        raise WireError(f"{len(packed.bias_token_ids)} token ids with {len(packed.bias_values)} values of logit bias")
    if not all(word.token_ids for word in packed.bad_words):
        raise WireError("a bad word without tokens")
    return SamplingParams(
        **_SHARED.of(packed),
        stop_token_ids=tuple(packed.stop_token_ids),
        num_logprobs=packed.num_logprobs if packed.HasField("num_logprobs") else None,
        num_prompt_logprobs=packed.num_prompt_logprobs if packed.HasField("num_prompt_logprobs") else None,
        repetition_penalty=packed.repetition_penalty if packed.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(zip(packed.bias_token_ids, packed.bias_values, strict=True)),
        bad_words=tuple(tuple(word.token_ids) for word in packed.bad_words),
        allowed_token_ids=tuple(packed.allowed_token_ids),
        logprob_token_ids=tuple(packed.logprob_token_ids),
    )
