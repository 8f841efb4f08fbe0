"""The capsule: all that a sequence needs, beside its KV, to continue on another worker."""

from dataclasses import dataclass

import numpy as np

from services.config import Pooling
from services.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Capsule:
    """The tokens so far, and the parameters by which they continue.

    token_ids: int32[n], the prompt followed by the tokens that were generated and delivered. num_prompt: the number of
    tokens in the prompt, 1 <= num_prompt <= n.
    """

    token_ids: np.ndarray
    num_prompt: int
    sampling: SamplingParams
    pooling: Pooling | None = None  # an embedding of the prompt is wanted and no token; None: tokens are

    @property
    def max_len(self) -> int:
        """Returns the length of the sequence at which `max_tokens` is reached."""
        return self.num_prompt + self.sampling.max_tokens
