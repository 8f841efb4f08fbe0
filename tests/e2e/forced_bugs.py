"""Bugs that the checks of forced handoffs must find: each replaces one rule of a worker or of the gateway.

A bug is planted in each process before it begins, so its function must be one that another process can import.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvtransfer.consumer import Consumer
from kvtransfer.ids import AttemptId
from kvtransfer.transports.base import ReadEnd
from services.config import HandoffMode
from services.engine.attention.cpu_attention import CpuAttention
from services.engine.blocks.prefix_cache import NO_MATCH, PrefixCache
from services.engine.runner.base import ScoredTokens, StepLogprobs
from services.engine.runner.cpu import sampler
from services.engine.runner.cpu.torch_runner import TorchRunner
from services.engine.sequences.admission import Admitter
from services.engine.sequences.request import Kind, Request
from services.engine.sequences.sequences import Sequences
from services.gateway.dispatch.ledger.entry import LedgerEntry
from services.gateway.dispatch.placement import Placement
from services.gateway.dispatch.retries import Retries
from services.protocol.capsule import Capsule
from tests.e2e.corrupted import corrupt_reads
from tests.e2e.forced_checks import WITHIN

_TOO_FAR = 2 * WITHIN
_FAILING = 8  # one in so many handoffs fails


def damage_read_blocks() -> None:
    """The first block of a handoff holds what its second one holds."""
    corrupt_reads(0, 1)


def widen_windows() -> None:
    """A token sees one more token than its window has."""
    work = CpuAttention._work

    def wider(self: CpuAttention, *others: Any) -> Any:
        *same, window = others
        return work(self, *[*same, window and window + 1])

    _replace(CpuAttention, "_work", wider)


def shift_logprobs() -> None:
    """A sampled token's log-probability is a little too high."""
    logprobs = sampler._logprobs

    def shifted(*arguments: Any) -> StepLogprobs:
        found = logprobs(*arguments)
        return replace(found, sampled=found.sampled + np.float32(_TOO_FAR))

    _replace(sampler, "_logprobs", shifted)


def share_last_blocks_without_copies() -> None:
    """Choices after the first do not get what the last block of their prompt holds."""
    _replace(TorchRunner, "copy_block", lambda runner, source, destination: None)


def draw_alike() -> None:
    """All choices are drawn by one seed."""
    uniforms = sampler.uniforms
    _replace(sampler, "uniforms", lambda seeds, positions: uniforms(np.zeros_like(seeds), positions))


def misjudge_last_of_chunks() -> None:
    """The last scored token of a chunk is told too high a log-probability."""
    score = TorchRunner._score

    def misjudged(runner: TorchRunner, hidden: Any, scored: ScoredTokens) -> StepLogprobs:
        found = score(runner, hidden, scored)
        found.sampled[-1] += _TOO_FAR
        return found

    _replace(TorchRunner, "_score", misjudged)


def forget_prefixes() -> None:
    """No worker finds blocks that it has."""
    _replace(PrefixCache, "match", lambda *arguments: NO_MATCH)


def read_what_is_cached() -> None:
    """Decode workers read blocks that they have."""
    match = PrefixCache.match
    _replace(PrefixCache, "match", lambda *given: NO_MATCH if sys.argv[1] == "decode" else match(*given))


def admit_only_to_the_end() -> None:
    """A sequence is admitted once there is room for its last token, so that none is ever preempted."""
    blocks_needed = Admitter.blocks_needed

    def needed(admitter: Admitter, request: Request) -> int:
        longest = -(-request.capsule.max_len // admitter._batch.block_size)
        return max(blocks_needed(admitter, request), 0 if request.kind is Kind.PRODUCE else longest)

    _replace(Admitter, "blocks_needed", needed)


def preempt_with_a_wrong_token() -> None:
    """A preempted sequence comes back with another token in the place of its last one."""
    preempt = Sequences.preempt

    def preempted(sequences: Sequences, slot: int) -> None:
        known_tokens = sequences.batch.known_tokens(slot)  # a view
        known_tokens[-1] = known_tokens[-2]
        preempt(sequences, slot)

    _replace(Sequences, "preempt", preempted)


def fail_some_handoffs() -> None:
    """Reads of some handoffs bring blocks that were written again meanwhile, so that these are tried again."""
    read_ended = Consumer.read_ended

    def ended(consumer: Consumer, end: ReadEnd, now: float) -> None:
        id = consumer.reads._reads[end.read_id].id
        if id.handle % _FAILING == 0 and end.generations is not None:
            end = replace(end, generations=end.generations + 1)
        read_ended(consumer, end, now)

    _replace(Consumer, "read_ended", ended)


def never_hand_off() -> None:
    """Decode workers serve alone."""
    init = Placement.__init__

    def made(placement: Placement, ledger: Any, fleet: Any, policy: Any, *others: Any) -> None:
        init(placement, ledger, fleet, replace(policy, handoff=HandoffMode.NEVER), *others)

    _replace(Placement, "__init__", made)


def continue_with_a_wrong_token() -> None:
    """An attempt after one that failed begins with another token in the place of the last one."""
    capsule = LedgerEntry.capsule

    def made(entry: LedgerEntry) -> Capsule:
        right = capsule(entry)
        if not entry.generated:
            return right
        return replace(right, token_ids=np.append(right.token_ids[:-1], right.token_ids[-2]))

    _replace(LedgerEntry, "capsule", made)


def give_up() -> None:
    """No attempt follows one that failed."""
    _replace(Retries, "exhausted", property(lambda retries: "an attempt failed"))


def keep_leased_blocks() -> None:
    """Blocks that were handed off stay taken."""
    free = Sequences.free

    def freed(sequences: Sequences, id: AttemptId, quarantined: tuple[int, ...] = ()) -> None:
        record = sequences.requests.get(id)
        if record is not None:
            record.leased = None
        free(sequences, id, quarantined)

    _replace(Sequences, "free", freed)


def _replace(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


@dataclass(frozen=True, slots=True)
class Bug:
    """Where a bug is planted, and how it is found."""

    check: str  # the one that finds it
    words: str  # a pattern of what that says
    in_workers: Callable[[], None] | None = None
    in_gateway: Callable[[], None] | None = None
    shape: str = "llama-gqa3-biases"
    first: tuple[str, ...] = ()  # checks that run, and hold, before it

    def __str__(self) -> str:
        """Its name in a list of tests."""
        plant = self.in_workers or self.in_gateway
        return f"{self.check}-{plant.__name__ if plant else 'nothing'}".replace(" ", "-")


BUGS = [
    Bug("greedy", "prompt of [0-9]+ tokens", damage_read_blocks),
    Bug("greedy", "prompt of [0-9]+ tokens", widen_windows, shape="mistral-window"),
    Bug("greedy", r"approx(.|\n)*prompt of 1 tokens", shift_logprobs),
    Bug("greedy", "not every request was handed off", in_gateway=never_hand_off),
    Bug("choices", "prompt of 75 tokens", share_last_blocks_without_copies),
    Bug("choices", "drawn alike", draw_alike),
    Bug("choices", "the baseline did not come about", keep_leased_blocks),
    Bug("prompt logprobs", r"told\[str\(token\)\]", misjudge_last_of_chunks),
    Bug("prefix hits", "0 tokens are cached", forget_prefixes),
    Bug("prefix hits", "bytes moved; ", read_what_is_cached),
    Bug("preemption", "no sequence is computed again", admit_only_to_the_end),
    Bug("preemption", "prompt of [0-9]+ tokens", preempt_with_a_wrong_token),
    Bug("handoffs", "handoffs failed|completed > 20", fail_some_handoffs, first=("greedy",)),
    Bug("handoffs", "completed > 20"),
    Bug("killed decode worker", "assert tokens == expected.tokens", in_gateway=continue_with_a_wrong_token),
    Bug("killed decode worker", "The server failed to answer", in_gateway=give_up),
]
