"""What is asked: workloads by name, and prompts that are the same in every run."""

from dataclasses import dataclass

import numpy as np

_LOWEST_TOKEN_ID = 100  # below are special tokens, in most vocabularies


@dataclass(frozen=True, slots=True)
class Workload:
    """So many requests with prompts and answers of one length, in tokens."""

    requests: int
    input_tokens: int
    output_tokens: int


NAMED = {
    "decode": Workload(requests=64, input_tokens=48, output_tokens=128),
    "prefill": Workload(requests=64, input_tokens=462, output_tokens=16),
}


def prompts(workload: Workload, seed: int, highest_token_id: int) -> list[list[int]]:
    """One prompt of random token ids for each request; the same for the same seed."""
    random = np.random.default_rng(seed)
    shape = (workload.requests, workload.input_tokens)
    ids: list[list[int]] = random.integers(_LOWEST_TOKEN_ID, highest_token_id + 1, shape).tolist()
    return ids
