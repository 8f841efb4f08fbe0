"""The numbers of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). Nothing here needs torch."""

import math
from dataclasses import dataclass

LATENT_NORM_EPS = 1e-6  # of both norms between two products, whatever a model's rms_norm_eps is


@dataclass(frozen=True, slots=True)
class Latent:
    """The numbers of a model's latent attention."""

    kv_rank: int
    q_rank: int | None  # None: one product makes Q
    nope_dim: int  # of a head's Q and K, the part without positions
    rope_dim: int  # of a head's Q, and of the K that all heads share, the part with positions
    value_dim: int  # of a head's V
    is_interleaved: bool  # the pairs that are rotated lie next to each other; else in halves against each other
    score_factor: float  # on the attention scores, beside 1 / sqrt(head_dim)

    @property
    def width(self) -> int:
        """Returns how many numbers of KV a token has in each layer."""
        return self.kv_rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Returns how many numbers a head of Q has."""
        return self.nope_dim + self.rope_dim

    @property
    def scale(self) -> float:
        """Returns the factor on attention scores."""
        return self.score_factor / math.sqrt(self.query_dim)
