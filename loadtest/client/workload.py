"""Workloads by name, and their prompts, which are the same in every run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_LOWEST_TOKEN_ID = 100  # below are special tokens, in most vocabularies


@dataclass(frozen=True, slots=True)
class Workload:
    """A number of requests with prompts and answers of one length, in tokens."""

    requests: int
    input_tokens: int
    output_tokens: int
    shared_tokens: int = 0  # before the input, and the same in all prompts


NAMED = {
    "decode": Workload(requests=64, input_tokens=48, output_tokens=128),
    "prefill": Workload(requests=64, input_tokens=462, output_tokens=16),
}


def prompts(workload: Workload, seed: int | Sequence[int], highest_token_id: int) -> list[list[int]]:
    """Returns one prompt of random token ids for each request; equal seeds give equal prompts."""
    random = np.random.default_rng(seed)
    num_tokens = workload.requests * workload.input_tokens + workload.shared_tokens
    ids = random.integers(_LOWEST_TOKEN_ID, highest_token_id + 1, num_tokens)
    shared: list[int] = ids[: workload.shared_tokens].tolist()
    own = ids[workload.shared_tokens :].reshape(workload.requests, workload.input_tokens)
    return [shared + rest for rest in own.tolist()]
