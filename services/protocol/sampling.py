"""Sampling parameters as they travel: resolved by the gateway, so that every field has a value."""

from dataclasses import dataclass

MAX_TEMPERATURE = 2.0
MAX_TOP_K = 2**31 - 1  # of an int32 on the wire
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0  # penalties: far beyond what is of use, and logits stay finite in float32


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next tokens of one sequence.

    A token's logit is changed in the order logit_bias, repetition, frequency and presence penalty; then come
    temperature, top_k, top_p, min_p. Penalties count the sequence's own tokens, and randomness is a function of (seed,
    position of the token in the sequence), so a sequence continued elsewhere goes on as if it had stayed.
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
    num_prompt_logprobs: int | None = None  # the same for the prompt's tokens, from the second on
    presence_penalty: float = 0.0  # off the logit of each token that was generated
    frequency_penalty: float = 0.0  # the same, times how often it was
    repetition_penalty: float = 1.0  # divides (multiplies, below zero) the logit of each token in prompt or answer
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit), no id twice
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed in what is generated

    @property
    def counts_tokens(self) -> bool:
        """True when a token's logit depends on how often it is in the sequence."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1
