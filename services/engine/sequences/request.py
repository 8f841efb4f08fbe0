"""A request as the engine knows it, before and while it has a slot."""

from dataclasses import dataclass
from enum import Enum, auto

from kvtransfer.ids import AttemptId, WorkerId
from services.config import Pooling
from services.engine.blocks.prefix_cache import Match
from services.engine.sampling.grammars import Grammar, Party
from services.protocol.capsule import Capsule


class Kind(Enum):
    """The kinds of requests, by the part that this engine has in them."""

    LOCAL = auto()  # computes the prompt and generates
    PRODUCE = auto()  # computes the prompt, samples the first token, keeps the blocks for a consumer
    CONSUME = auto()  # takes the blocks from a producer and generates
    EMBED = auto()  # computes the prompt and pools its hidden states; generates nothing


@dataclass(frozen=True, slots=True)
class Branch:
    """One of several choices over one prompt; it is a sequence of its own from its first token on."""

    id: AttemptId
    seed: int


@dataclass(slots=True, eq=False)
class Request:
    """One attempt at one choice, or at the common prompt of several. Times are `time.monotonic`'s, in seconds."""

    id: AttemptId
    capsule: Capsule
    kind: Kind
    arrival: float
    deadline: float
    paired_with: WorkerId | None = None  # the consumer, for PRODUCE; the producer, for CONSUME
    announced: int = 0  # CONSUME: leading slices that its producer has announced
    work: int = 0  # tokens to compute, by what was cached when the request came
    started: bool = False  # its first row was sent before it was preempted
    branches: tuple[Branch, ...] = ()  # none: the request is a sequence itself
    parent: AttemptId | None = None  # of a branch: its prompt's request
    grammar: Grammar | None = None  # of its answer, from the time when it is queued
    match: Match | None = None  # its cached prefix when the cache's version was `matched_at`
    matched_at: int = -1

    def match_at(self, version: int) -> Match | None:
        """Returns the last match, if the prefix cache still has the version that it was made at; else None."""
        return self.match if self.matched_at == version else None

    @property
    def party(self) -> Party:
        """The one whose request it is, as far as this worker is told."""
        return self.id.gateway, self.capsule.tenant

    @property
    def needs_whole_prompt(self) -> bool:
        """True when all of the prompt must be computed here, whatever is cached."""
        pooled = self.kind is Kind.EMBED and self.capsule.pooling is not Pooling.LAST
        return pooled or self.scores_prompt

    @property
    def scores_prompt(self) -> bool:
        """True when the prompt's tokens have logprobs."""
        return self.kind is not Kind.CONSUME and self.capsule.sampling.num_prompt_logprobs is not None
