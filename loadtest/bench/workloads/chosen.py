"""The workload that settings ask for. Settings that it does not take are refused."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from loadtest.bench.lengths import Lengths, read_lengths
from loadtest.bench.prompts import HIGHEST_TOKEN_ID, Counter, Prompts, TokenIds, Words
from loadtest.bench.script import Workload
from loadtest.bench.settings import EndpointName, Settings, WorkloadName
from loadtest.bench.workloads.conversations import Conversations
from loadtest.bench.workloads.random_lengths import NAMED, REQUESTS, RandomLengths
from loadtest.bench.workloads.sharegpt import ShareGpt, read_conversations
from loadtest.bench.workloads.trace import BLOCK_TOKENS, Trace, read_trace
from loadtest.bench.workloads.with_fields import WithFields, schema_fields, tool_fields
from loadtest.cannot_run import CannotRun

_DATASET, _TRACE = "--dataset", "--trace"  # names of workloads that have a file

_LENGTHS = frozenset({"requests", "seconds", "input", "output"})
_TAKES: Mapping[str, frozenset[str]] = {
    WorkloadName.RANDOM: _LENGTHS,
    WorkloadName.PREFILL: _LENGTHS,
    WorkloadName.DECODE: _LENGTHS,
    WorkloadName.SHARED_PREFIX: frozenset({"input", "output", "prefix", "groups", "members"}),
    WorkloadName.CONVERSATIONS: _LENGTHS | {"turns", "pause"},
    WorkloadName.STRUCTURED: _LENGTHS | {"schema"},
    WorkloadName.TOOLS: _LENGTHS,
    _DATASET: frozenset({"requests", "seconds", "output", "turns", "pause", "longest"}),
    _TRACE: frozenset({"requests", "seconds", "longest", "trace_block", "speed"}),
}
_BY_IDS = (WorkloadName.RANDOM, WorkloadName.PREFILL, WorkloadName.DECODE, WorkloadName.SHARED_PREFIX, _TRACE)
_CHATS_ALONE = (WorkloadName.STRUCTURED, WorkloadName.TOOLS)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A workload, the endpoint for it, requests to warm up with, and whether answers are to be JSON."""

    workload: Workload
    endpoint: EndpointName
    warm_up: Workload
    is_json: bool


def choose(settings: Settings) -> Chosen:
    """Finds the workload. Raises CannotRun for settings that contradict each other, and for files."""
    kind = _kind(settings)
    _refuse_others(settings, kind)
    endpoint = settings.endpoint or (EndpointName.TOKEN_IDS if kind in _BY_IDS else EndpointName.CHAT)
    _check_endpoint(settings, kind, endpoint)
    makers: Mapping[str, Callable[[_Maker], Workload]] = {
        WorkloadName.SHARED_PREFIX: _Maker.shared_prefix,
        WorkloadName.CONVERSATIONS: _Maker.conversations,
        WorkloadName.STRUCTURED: _Maker.structured,
        WorkloadName.TOOLS: _Maker.tools,
        _DATASET: _Maker.dataset,
        _TRACE: _Maker.trace,
    }
    maker = _Maker(settings, endpoint)
    workload = makers.get(kind, _Maker.random)(maker)
    return Chosen(workload, endpoint, maker.warm_up(workload), kind in _CHATS_ALONE)


def _kind(settings: Settings) -> str:
    named = [
        name
        for name, value in (
            (_DATASET, settings.dataset),
            (_TRACE, settings.trace),
            (settings.workload or "", settings.workload),
        )
        if value is not None
    ]
    if len(named) > 1:
        raise CannotRun("--workload, --dataset and --trace each name a workload: say one of them")
    return named[0] if named else WorkloadName.RANDOM


def _refuse_others(settings: Settings, kind: str) -> None:
    for name in sorted(frozenset().union(*_TAKES.values()) - _TAKES[kind]):
        if getattr(settings, name) is not None:
            takers = ", ".join(taker for taker, taken in _TAKES.items() if name in taken)
            raise CannotRun(f"--{name.replace('_', '-')} is not for the workload {kind}, but for {takers}")


def _check_endpoint(settings: Settings, kind: str, endpoint: EndpointName) -> None:
    by_ids = endpoint is EndpointName.TOKEN_IDS
    if by_ids and kind not in _BY_IDS:
        raise CannotRun(f"--endpoint {endpoint}: the workload {kind} has texts")
    if kind in _CHATS_ALONE and endpoint is not EndpointName.CHAT:
        raise CannotRun(f"--endpoint {endpoint}: the workload {kind} is of chats")
    if by_ids and settings.tokenizer is not None:
        raise CannotRun(f"--tokenizer is for texts; with --endpoint {endpoint} prompts are token ids")
    if not by_ids and settings.highest_token_id is not None:
        raise CannotRun(f"--highest-token-id is for token ids; with --endpoint {endpoint} prompts are texts")


class _Maker:
    """Makes workloads of settings. Raises CannotRun."""

    def __init__(self, settings: Settings, endpoint: EndpointName) -> None:
        self._settings = settings
        self._counter = None if settings.tokenizer is None else Counter(settings.tokenizer)
        self._prompts = self._made_prompts(endpoint)

    def _made_prompts(self, endpoint: EndpointName) -> Prompts:
        if endpoint is EndpointName.TOKEN_IDS:
            return TokenIds(self._settings.highest_token_id or HIGHEST_TOKEN_ID)
        return Words() if self._counter is None else Words(self._counter.single_words())

    def _requests(self, default: int = REQUESTS) -> int | None:
        """The number of requests; None where there is a limit of time alone."""
        if self._settings.requests is None and (self._settings.seconds is not None or self._settings.find_rate):
            return None
        return self._settings.requests or default

    def _lengths(self, input: int, output: int) -> tuple[Lengths, Lengths]:
        texts = (self._settings.input, "--input", input), (self._settings.output, "--output", output)
        found = [Lengths.fixed(default) if text is None else read_lengths(text, flag) for text, flag, default in texts]
        return found[0], found[1]

    def random(self) -> Workload:
        """Random, prefill and decode."""
        named = NAMED.get(self._settings.workload or "")
        lengths = (256, 64) if named is None else (named.input.longest, named.output.longest)
        return RandomLengths(self._requests(), *self._lengths(*lengths), prompts=self._prompts)

    def shared_prefix(self) -> Workload:
        """Groups that begin alike."""
        groups, members = self._settings.groups or 4, self._settings.members or 16
        lengths = self._lengths(64, 64)
        return RandomLengths(
            None if self._settings.find_rate else groups * members,
            *lengths,
            prefix_tokens=self._settings.prefix or 1024,
            groups=groups,
            prompts=self._prompts,
        )

    def _turns(self, default: int) -> tuple[int, float]:
        """The number of turns, and the pause between them in seconds."""
        turns = self._settings.turns or default
        if turns == 1 and self._settings.pause is not None:
            raise CannotRun("--pause is between turns: say how many, as --turns 4")
        return turns, self._settings.pause or 0.0

    def conversations(self) -> Workload:
        """Conversations of random contents."""
        turns, pause_s = self._turns(4)
        return Conversations(self._requests(), turns, *self._lengths(64, 64), pause_s, self._prompts)

    def structured(self) -> Workload:
        """Answers by a schema."""
        fields = schema_fields(self._settings.schema)
        return WithFields("structured", fields, self._requests(), *self._lengths(256, 512), self._prompts)

    def tools(self) -> Workload:
        """Answers that call tools."""
        return WithFields("tools", tool_fields(), self._requests(), *self._lengths(256, 512), self._prompts)

    def dataset(self) -> Workload:
        """Prompts of a file, of which at least one fits."""
        assert self._settings.dataset is not None
        turns, pause_s = self._turns(1)
        output = self._settings.output
        workload = ShareGpt(
            self._settings.dataset,
            read_conversations(self._settings.dataset),
            self._requests(),
            turns,
            None if output is None else read_lengths(output, "--output"),
            self._settings.longest,
            pause_s,
            self._counter,
        )
        next(workload.scripts(self._settings.seed))
        return workload

    def trace(self) -> Workload:
        """Requests of a trace."""
        assert self._settings.trace is not None
        lines, left_out = read_trace(self._settings.trace, self._settings.requests, self._settings.longest)
        block_tokens, speed = self._settings.trace_block or BLOCK_TOKENS, self._settings.speed or 1.0
        return Trace(self._settings.trace.name, lines, left_out, block_tokens, speed, self._prompts)

    def warm_up(self, workload: Workload) -> Workload:
        """Requests of the same kind; for a file short ones of random contents."""
        requests = self._settings.warmup
        if isinstance(workload, RandomLengths | Conversations | WithFields):
            return dataclasses.replace(workload, num_scripts=requests)
        return RandomLengths(requests, Lengths.fixed(64), Lengths.fixed(16), prompts=self._prompts)
