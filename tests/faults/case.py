"""One fault and the requests around it: none may be lost or wrong, and no block may stay taken."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Protocol

from loadtest.ledger import leftovers
from tests.e2e.conftest import clear_prompt, generate
from tests.e2e.stack import Endpoint, Stack, wait_until
from tests.faults.clients import Client
from tests.faults.table import Verdict

NUM_STREAMED, NUM_ASKED = 400, 24  # tokens
_seeds = count(1000, 40)  # prompts that no worker has cached
_BASELINE_S = 200.0  # leases, graces and quarantines are over by then
_LEAST_LEFT = NUM_STREAMED // 2  # tokens of a stream that is under way when a fault begins


Starts = Callable[[Endpoint, Path, list[int], int], Client]  # at a gateway, with a model's prompt and so many tokens


class Disturbed(Protocol):
    """The processes that a fault befalls."""

    model: Path

    @property
    def gateway(self) -> Endpoint:
        """Where clients ask."""

    def heal(self) -> None:
        """Returns when everything runs and is connected."""


class Case:
    """Starts clients, is told when the fault begins, and gives the verdict."""

    def __init__(self, stack: Disturbed, record: Callable[[Verdict], None]) -> None:
        self.stack = stack
        self._record = record
        self.verdict: Verdict | None = None
        self.clients: list[Client] = []
        self._began: float | None = None

    def prompts(self, number: int, length: int = 100) -> list[list[int]]:
        """Prompts like no others. They take their time: what undisturbed answers are is computed here."""
        first = next(_seeds)
        return [
            clear_prompt(self.stack.model, first + index, length + 10 * index, NUM_ASKED) for index in range(number)
        ]

    def ask(self, prompts: list[list[int]]) -> list[Client]:
        """Starts a client for each prompt, whose answer is short."""
        return self._start(prompts, NUM_ASKED)

    def stream(self, number: int = 4, gateway: Endpoint | None = None, kind: Starts = Client) -> list[Client]:
        """Starts clients with long answers, and returns when all of them have text. See `start_streams`."""
        started = self.start_streams(number, gateway, kind)
        wait_until(lambda: all(each.text for each in started), 200, "text on every stream")
        return started

    def start_streams(self, number: int, gateway: Endpoint | None = None, kind: Starts = Client) -> list[Client]:
        """Starts clients with long answers.

        gateway: another than the stack's. kind: makes a client of some kind.
        """
        model = self.stack.model
        prompts = [clear_prompt(model, 80 + index, 50 + 10 * index, NUM_STREAMED) for index in range(number)]
        for prompt in prompts:
            generate(model, prompt, NUM_STREAMED)  # before the fault, not within it
        return self._start(prompts, NUM_STREAMED, gateway, kind)

    def _start(
        self, prompts: list[list[int]], num_tokens: int, gateway: Endpoint | None = None, kind: Starts = Client
    ) -> list[Client]:
        asked = gateway or self.stack.gateway
        started = [kind(asked, self.stack.model, prompt, num_tokens) for prompt in prompts]
        self.clients += started
        return started

    def fault(self) -> None:
        """Notes that the fault begins now. Recovery is measured from here."""
        self._began = time.monotonic()

    def settle(self, cut: list[Client] | None = None) -> None:
        """Waits for all ends, heals the stack, and asserts that nothing was lost, wrong or leaked.

        The recovery is the longest time without news for a client; without clients, the time until all blocks are back.
        cut: clients whose gateway was killed; their connections break with it.
        """
        assert self._began is not None, "no fault began"
        lost = sum(each.is_lost() and each not in (cut or []) for each in self.clients)
        wrong = sum(each.is_wrong() for each in self.clients)
        recovery_s = max((each.longest_wait_s(self._began) for each in self.clients), default=None)
        errors = [each.error for each in self.clients if each.error is not None]
        self.stack.heal()
        leaked = self._leaked()
        if recovery_s is None:  # nobody waited but for the blocks
            recovery_s = time.monotonic() - self._began
        self.verdict = Verdict(lost, wrong, leaked, recovery_s)
        self._record(self.verdict)
        print(f"lost {lost}, wrong {wrong}, leaked {leaked}, recovery {recovery_s:.2f} s, errors {errors}")
        assert (lost, wrong, leaked) == (0, 0, 0)
        assert errors == [], errors

    def _leaked(self) -> int:
        """Blocks that are neither free nor evictable, and ledger entries, when all should long be over."""
        with contextlib.suppress(AssertionError):
            self.stack.gateway.wait_for_baseline(_BASELINE_S)
            return 0
        left = leftovers(self.stack.gateway.ledger())
        return left.blocks + left.entries


@contextlib.contextmanager
def case_of(stack: Disturbed, record: Callable[[Verdict], None]) -> Iterator[Case]:
    """A case that must have settled when its test ends well. Whatever the test did, the stack is healed after it."""
    case = Case(stack, record)
    try:
        yield case
        assert case.verdict is not None, "the test gave no verdict"
    finally:
        stack.heal()


def busiest(stack: Stack, role: str) -> str:
    """The worker of a role with most requests of the ledger, which must be at least one: a fault hits somebody."""
    victim = _busiest(stack, role)
    assert victim is not None, f"no request is at a {role} worker"
    return victim


def _busiest(stack: Stack, role: str) -> str | None:
    addresses = Counter(entry[role] for entry in stack.gateway.ledger()["rows"])
    names = {stack.address(name): name for name in stack.ports}
    addresses.pop(None, None)
    return names[addresses.most_common(1)[0][0]] if addresses else None


@contextlib.contextmanager
def in_midstream(stack: Stack, case: Case, number: int = 4, kind: Starts = Client) -> Iterator[str]:
    """Starts streams, and has all workers stand still in their middle: a fault that begins here finds them under way.

    Gives the decode worker that has most of them. What is left of the workers goes on when the context ends.
    """
    for _ in range(20):
        case.stream(number, kind=kind)
        with standing(stack):
            rows = stack.gateway.ledger()["rows"]
            victim = _busiest(stack, "decode")
            if victim is not None and all(row["tokens_delivered"] <= NUM_STREAMED - _LEAST_LEFT for row in rows):
                case.fault()
                yield victim
                return
    raise AssertionError("streams were over, twenty times, before they were looked at")


@contextlib.contextmanager
def standing(stack: Stack) -> Iterator[None]:
    """All workers are frozen while the context lasts; those that are left of them go on."""
    for process in stack.processes_of_workers():
        process.freeze()
    try:
        yield
    finally:
        for process in stack.processes_of_workers():
            process.thaw()
