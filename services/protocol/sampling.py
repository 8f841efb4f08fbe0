"""Sampling parameters as they travel: resolved by the gateway, so that every field has a value."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next tokens of one sequence.

    Filters apply in the order temperature, top_k, top_p, min_p. Randomness is a function of (seed, position of the
    token in the sequence), so a sequence continued elsewhere goes on as if it had stayed.
    """

    max_tokens: int  # generated tokens in all, counted from the end of the prompt
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    min_p: float = 0.0
    seed: int = 0  # unsigned, 64 bits
    min_tokens: int = 0  # no EOS and no stop token before so many generated tokens
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None  # alternatives reported for each token; None: no logprobs at all
