"""The capsule: what a sequence needs, beside its KV, to go on elsewhere."""

from dataclasses import dataclass

import numpy as np

from services.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Capsule:
    """Tokens so far and how to go on from them.

    token_ids: int32[n], the prompt followed by what was generated and delivered.
    num_prompt: how many of them are the prompt, 1 <= num_prompt <= n.
    """

    token_ids: np.ndarray
    num_prompt: int
    sampling: SamplingParams

    @property
    def max_len(self) -> int:
        """Length of the sequence at which `max_tokens` is reached."""
        return self.num_prompt + self.sampling.max_tokens
