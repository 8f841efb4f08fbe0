"""The parameters of rotary embeddings. Nothing here needs torch."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Scaling that divides all positions by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Scaling of frequencies by wavelength, as in Llama 3.1."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Scaling of frequencies by how often they turn within the original context (Peng et al. 2023, arXiv
    2309.00071).
    """

    factor: float
    attention_factor: float  # factor on cosine and sine
    beta_fast: float  # frequencies with so many turns or more are kept
    beta_slow: float  # frequencies with so many turns or fewer are divided by `factor`
    truncate: bool  # the ramp between both begins and ends at whole dimensions
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """A divisor for each frequency, as GGUF files of Llama 3.1 and later have them."""

    factors: tuple[float, ...]  # [head_dim / 2]


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """Scaling of the base by the length of the longest sequence that is served, beyond the original context ("dynamic
    NTK").

    `transformers` takes each sequence's own length, and leaves keys as an earlier length had them. Here one base serves
    all sequences, as in vLLM, since KV is shared by sequences of different lengths. Up to the original context both are
    the plain rope.
    """

    factor: float
    original_max_position_embeddings: int
    longest: int  # tokens of the longest sequence, at least those of the original context


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """A divisor for each frequency, by one list for sequences within the original context, by another for longer ones
    (LongRoPE, Ding et al. 2024, arXiv 2402.13753).

    `transformers` chooses by each sequence's length, and computes all KV of a sequence again when it outgrows the
    original context. Here one list serves all sequences, as in vLLM, since KV is shared by sequences of different
    lengths: the long one, if any sequence may be so long.
    """

    short_factors: tuple[float, ...]  # [rotary_dim / 2]
    long_factors: tuple[float, ...]
    attention_factor: float  # factor on cosine and sine
    original_max_position_embeddings: int
    is_long: bool  # the long list serves

    @property
    def factors(self) -> tuple[float, ...]:
        """Returns the list that serves."""
        return self.long_factors if self.is_long else self.short_factors


Scaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors | DynamicScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """The parameters of a rotary embedding."""

    theta: float
    scaling: Scaling | None = None

    def for_lengths(self, longest: int) -> "Rope":
        """Returns the rope of a model that serves sequences of so many tokens at most. KV of one rope is not KV of
        another.
        """
        match self.scaling:
            case DynamicScaling(_, context, _):
                return replace(self, scaling=replace(self.scaling, longest=max(longest, context)))
            case LongRopeScaling():
                is_long = longest > self.scaling.original_max_position_embeddings
                return replace(self, scaling=replace(self.scaling, is_long=is_long))
        return self

    def longest(self, max_position_embeddings: int) -> int:
        """Returns how many tokens a sequence may have where more are asked for than the model's positions."""
        if isinstance(self.scaling, DynamicScaling):
            return max(max_position_embeddings, int(max_position_embeddings * self.scaling.factor))
        return max_position_embeddings
