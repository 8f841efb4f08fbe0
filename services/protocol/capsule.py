"""The capsule: all that a sequence needs, beside its KV, to continue on another worker."""

from dataclasses import dataclass

import numpy as np

from services.config import Pooling
from services.protocol.capabilities import needs_of
from services.protocol.contents import COMMON, Contents, Media, Namespace
from services.protocol.sampling import SamplingParams

TENANT_SALT = 64  # characters of a salt, with which gateways that know tenants begin all salts of one


@dataclass(frozen=True, slots=True, eq=False)
class Capsule:
    """The tokens so far, and the parameters by which they continue.

    token_ids: int32[n], the prompt followed by the tokens that were generated and delivered. num_prompt: the number of
    tokens in the prompt, 1 <= num_prompt <= n. cache_salt: only sequences with the same one share cached blocks; empty:
    those without one do. priority: lower ones are served sooner. second_text: where the prompt is a pair of texts and
    the model's tokens have types, the index of the second text's first token, from which on they have type 1; 0: all
    have type 0. adapter, media: see contents.py; nothing asks for them so far, and no message carries them.
    """

    token_ids: np.ndarray
    num_prompt: int
    sampling: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    pooling: Pooling | None = None  # an embedding of the prompt is wanted and no token; None: tokens are
    adapter: str = ""
    media: tuple[Media, ...] = ()
    second_text: int = 0

    @property
    def needs(self) -> frozenset[str]:
        """Returns the names of the capabilities that a worker must have: without one it would do something else."""
        return needs_of(self)

    @property
    def many_alternatives(self) -> int:
        """See `SamplingParams.many_alternatives`."""
        return self.sampling.many_alternatives(self.num_prompt)

    @property
    def namespace(self) -> Namespace:
        """Returns the namespace of the sequence's blocks."""
        return Namespace(self.cache_salt, self.adapter) if self.cache_salt or self.adapter else COMMON

    @property
    def contents(self) -> Contents:
        """Returns what the sequence's blocks are made from."""
        return Contents(self.token_ids, self.media)

    @property
    def tenant(self) -> str:
        """Returns what the salts of one tenant have in common. Without tenants, it is the request's own salt."""
        return self.cache_salt[:TENANT_SALT]

    @property
    def max_len(self) -> int:
        """Returns the length of the sequence at which `max_tokens` is reached."""
        return self.num_prompt + self.sampling.max_tokens
