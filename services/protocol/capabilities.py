"""Capabilities: what a request may ask of a worker and not every worker can do, each by one name.

A capsule's `needs` are the names of what it asks for, and a worker's `knows` those of what it can do. A request goes
only to workers that know all it needs. Both come from this table, so a name that is asked for and that no worker of
this version has does not exist. A name in `knows` that is not in the table is a newer worker's.

What workers of every version do is not here, and neither is what an older worker may ignore without harm.
"""

from dataclasses import dataclass
from operator import attrgetter

from services.protocol.sampling import FEW_ALTERNATIVES

GRAMMAR = "grammar"
EMBEDDINGS = "embeddings"
CACHE_SALT = "cache_salt"
ALLOWED_TOKEN_IDS = "allowed_token_ids"
LOGPROB_TOKEN_IDS = "logprob_token_ids"
MANY_LOGPROBS = "many_logprobs"
TOKEN_TYPES = "token_types"


@dataclass(frozen=True, slots=True)
class Capability:
    """One line of the table.

    name: in `needs` and `knows`. field: of a capsule, as a dotted path; any value but none and an empty one asks for
    the capability. words: what a client asks for by it. of_every_worker: every worker of this version has it, whatever
    its model, role and options.
    """

    name: str
    field: str
    words: str
    of_every_worker: bool = True


CAPABILITIES = (
    Capability(GRAMMAR, "sampling.grammar", "answers that must have a form", of_every_worker=False),
    Capability(EMBEDDINGS, "pooling", "embeddings", of_every_worker=False),
    Capability(CACHE_SALT, "cache_salt", "caches kept apart, by 'cache_salt' or for the tenants of keys"),
    Capability(ALLOWED_TOKEN_IDS, "sampling.allowed_token_ids", "'allowed_token_ids'"),
    Capability(LOGPROB_TOKEN_IDS, "sampling.logprob_token_ids", "'logprob_token_ids'"),
    Capability(MANY_LOGPROBS, "many_alternatives", f"more than {FEW_ALTERNATIVES} alternatives of a token"),
    Capability(TOKEN_TYPES, "second_text", "pairs of texts whose tokens have types", of_every_worker=False),
)

# A worker that guides answers knows GRAMMAR beside these, one that makes embeddings EMBEDDINGS, and one whose model has
# types of tokens TOKEN_TYPES.
OF_EVERY_WORKER = frozenset(each.name for each in CAPABILITIES if each.of_every_worker)

_FIELDS = tuple((each.name, attrgetter(each.field)) for each in CAPABILITIES)
_WORDS = {each.name: each.words for each in CAPABILITIES}


def needs_of(capsule: object) -> frozenset[str]:
    """Returns the names of what a capsule asks for."""
    return frozenset([name for name, field in _FIELDS if field(capsule)])


def in_words(names: frozenset[str]) -> str:
    """Returns what a client asks for by these names, at least one, as part of a sentence."""
    return ", ".join(_WORDS[name] for name in sorted(names))
