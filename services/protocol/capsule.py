"""The capsule: all that a sequence needs, beside its KV, to continue on another worker."""

from dataclasses import dataclass

import numpy as np

from services.config import Pooling
from services.protocol.sampling import SamplingParams

# What workers of older versions do not act on, by the names that hellos and `Capsule.needs` have for it.
CACHE_SALT = "cache_salt"
ALLOWED_TOKEN_IDS = "allowed_token_ids"
LOGPROB_TOKEN_IDS = "logprob_token_ids"
MANY_LOGPROBS = "many_logprobs"  # more than FEW_ALTERNATIVES of a token; older workers refuse them

TENANT_SALT = 64  # characters of a salt, with which gateways that know tenants begin all salts of one


@dataclass(frozen=True, slots=True, eq=False)
class Capsule:
    """The tokens so far, and the parameters by which they continue.

    token_ids: int32[n], the prompt followed by the tokens that were generated and delivered. num_prompt: the number of
    tokens in the prompt, 1 <= num_prompt <= n. cache_salt: only sequences with the same one share cached blocks; empty:
    those without one do. priority: lower ones are served sooner.
    """

    token_ids: np.ndarray
    num_prompt: int
    sampling: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    pooling: Pooling | None = None  # an embedding of the prompt is wanted and no token; None: tokens are

    @property
    def needs(self) -> frozenset[str]:
        """Returns the names of the fields that a worker must know: without them it would do something else."""
        sampling = self.sampling
        asked = {
            CACHE_SALT: self.cache_salt,
            ALLOWED_TOKEN_IDS: sampling.allowed_token_ids,
            LOGPROB_TOKEN_IDS: sampling.logprob_token_ids,
            MANY_LOGPROBS: self.many_alternatives,
        }
        return frozenset(name for name, value in asked.items() if value)

    @property
    def many_alternatives(self) -> int:
        """See `SamplingParams.many_alternatives`."""
        return self.sampling.many_alternatives(self.num_prompt)

    @property
    def tenant(self) -> str:
        """Returns what the salts of one tenant have in common. Without tenants, it is the request's own salt."""
        return self.cache_salt[:TENANT_SALT]

    @property
    def max_len(self) -> int:
        """Returns the length of the sequence at which `max_tokens` is reached."""
        return self.num_prompt + self.sampling.max_tokens
