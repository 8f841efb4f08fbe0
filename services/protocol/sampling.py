"""Sampling parameters as they travel: the gateway resolves them, so that every field has a value."""

from dataclasses import dataclass

MAX_TEMPERATURE = 2.0
MAX_TOP_K = 2**31 - 1  # an int32 on the wire
MAX_GRAMMAR = 1 << 18  # characters; gateways allow fewer
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0  # penalties in this range leave logits finite in float32
FEW_ALTERNATIVES = 128  # of a token, which workers of every version report; more are bounded for the whole answer
MAX_ALTERNATIVES = 1 << 20  # of an answer in which tokens have more than FEW_ALTERNATIVES each
BAN = -100.0  # as a bias, or less: the token is never chosen, whatever its logit


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters by which the next tokens of one sequence are chosen.

    A token's logit is changed in the order logit_bias, repetition, frequency and presence penalty; then come
    temperature, top_k, top_p, min_p. Penalties count the sequence's own tokens, and randomness is a function of (seed,
    position of the token in the sequence), so a sequence that continues on another worker continues in the same way.
    """

    max_tokens: int  # generated tokens in all, counted from the end of the prompt
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    min_p: float = 0.0
    seed: int = 0  # unsigned, 64 bits
    min_tokens: int = 0  # generated tokens before which neither EOS nor a stop token comes
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None  # alternatives reported for each token; None: no logprobs at all
    num_prompt_logprobs: int | None = None  # alternatives for the prompt's tokens after the first; None: no logprobs
    presence_penalty: float = 0.0  # subtracted from the logit of each generated token
    frequency_penalty: float = 0.0  # subtracted once for each time that the token was generated
    repetition_penalty: float = 1.0  # divides (multiplies, if negative) the logit of each token in prompt or answer
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit), no id twice; see BAN
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed in what is generated
    grammar: str = ""  # of llguidance, which the whole answer matches; empty: any answer does
    allowed_token_ids: tuple[int, ...] = ()  # the only tokens that are generated; none: all are allowed
    logprob_token_ids: tuple[int, ...] = ()  # the alternatives to report, in this order; none: the likeliest

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """The tokens that are never generated: by their bias, or as bad words of one token."""
        biased = (token for token, bias in self.logit_bias if bias <= BAN)
        return frozenset((*biased, *(word[0] for word in self.bad_words if len(word) == 1)))

    def many_alternatives(self, num_prompt: int) -> int:
        """Returns how many alternatives a sequence may report of tokens that have more than FEW_ALTERNATIVES each."""
        asked = ((self.num_logprobs or 0, self.max_tokens), (self.num_prompt_logprobs or 0, num_prompt))
        return sum(width * num_tokens for width, num_tokens in asked if width > FEW_ALTERNATIVES)

    @property
    def restricts_tokens(self) -> bool:
        """Returns True if some tokens must not be generated, now or later."""
        return bool(self.grammar or self.allowed_token_ids or self.logit_bias or self.bad_words)

    @property
    def counts_tokens(self) -> bool:
        """Returns True if a token's logit depends on how often it is in the sequence."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1
