"""Grammars that requests wait for: each is compiled once, in turns, for as long as somebody waits for it."""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from llguidance import LLMatcher

from kvtransfer.ids import AttemptId, GatewayId
from services.engine.sampling.grammars import Grammar, Grammars
from services.engine.sampling.guidance import Guidance
from services.protocol.outcomes import FailureCode
from tests.engine.harness import GATEWAY, Driven
from tests.engine.test_guidance import EOS, GRAMMAR, PROMPT, VOCAB, assert_matches, make

ONE, OTHER = (GatewayId(1), "one"), (GatewayId(1), "other")
GUIDANCE = Guidance("byte", VOCAB, (EOS,))


class Slow:
    """Compiles when it is let, and notes what."""

    def __init__(self) -> None:
        self.let, self.texts = threading.Semaphore(0), list[str]()
        self.begun, self.done = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, text: str) -> LLMatcher:
        self.texts.append(text)
        self.begun.release()
        self.let.acquire()
        return GUIDANCE._compile(text)

    def wait(self) -> None:
        """Waits until both threads compile."""
        for _ in range(2):
            assert self.begun.acquire(timeout=300)

    def finish(self, grammars: Grammars, num_grammars: int) -> None:
        """Lets so many be compiled, and waits for them."""
        grammars.on_compiled = self.done.release
        for _ in range(num_grammars):
            self.let.release()
        for _ in range(num_grammars):
            assert self.done.acquire(timeout=300)


@pytest.fixture
def slow() -> Iterator[Slow]:
    compile = Slow()
    yield compile
    for _ in range(10_000):  # of a test that failed
        compile.let.release()


def digits(count: int) -> str:
    return LLMatcher.grammar_from_regex(f"[0-9]{{{count}}}")


def asked(grammars: Grammars, text: str, party: tuple[GatewayId, str] = ONE) -> Grammar:
    grammar = grammars.ask(text, party)
    assert grammar is not None
    return grammar


def driven_with(compile: Callable[[str], LLMatcher]) -> tuple[Driven, Grammars]:
    driven = make()
    guidance = driven.engine.sequences.batch.guidance
    assert guidance is not None
    guidance.grammars = Grammars(compile)
    return driven, guidance.grammars


def test_more_grammars_than_are_kept_wait_at_once_and_all_come():
    driven, compiled = make(num_blocks=512, max_num_seqs=64), threading.Event()
    guidance = driven.engine.sequences.batch.guidance
    assert guidance is not None
    guidance.grammars.on_compiled = compiled.set
    handles = [driven.submit(PROMPT, 2, grammar=digits(count)) for count in range(3, 303)]
    for _ in range(2_000):
        compiled.clear()
        if not driven.step() and len(driven.finish) < len(handles):
            compiled.wait(0.1)
    assert sorted(driven.finish) == handles
    driven.assert_baseline()


def test_a_grammar_waits_for_no_more_of_anothers_than_there_are_threads(slow: Slow):
    grammars = Grammars(slow)
    for count in range(3, 23):
        asked(grammars, digits(count))
    slow.wait()
    asked(grammars, GRAMMAR, OTHER)
    slow.finish(grammars, 21)
    assert GRAMMAR in slow.texts[:4]
    assert len(slow.texts) == 21


def test_tenants_of_a_gateway_are_parties_whatever_salts_their_requests_name():
    driven, _ = driven_with(GUIDANCE._compile)
    tenant = "5" * 64
    requests = []
    for salt in (tenant, tenant + "a", tenant + "b", "6" * 64):
        handle = driven.submit(PROMPT, 2, salt=salt, grammar=GRAMMAR)
        record = driven.engine.sequences.requests.get(AttemptId(GATEWAY, handle))
        assert record is not None
        requests.append(record.request)
    assert [request.party for request in requests] == [(GATEWAY, tenant)] * 3 + [(GATEWAY, "6" * 64)]


WAYS_TO_LEAVE: dict[str, Callable[[Driven, int], None]] = {
    "aborted": lambda driven, handle: driven.engine.sequences.free(AttemptId(GATEWAY, handle)),
    "computed no further": lambda driven, handle: driven.engine.sequences.stop_computing(AttemptId(GATEWAY, handle)),
    "expired": lambda driven, handle: driven.engine.sequences.fail_expired(2e9),
}


@pytest.mark.parametrize("leave", WAYS_TO_LEAVE.values(), ids=WAYS_TO_LEAVE)
def test_no_grammar_is_compiled_that_no_request_waits_for(leave: Callable[[Driven, int], None], slow: Slow):
    driven, grammars = driven_with(slow)
    grammars.on_compiled = slow.done.release
    handles = [driven.submit(PROMPT, 2, grammar=digits(count)) for count in range(3, 23)]
    slow.wait()
    for handle in handles:
        leave(driven, handle)
    wanted = driven.submit(PROMPT, 60, grammar=GRAMMAR)
    slow.finish(grammars, 3)
    driven.run()
    assert_matches(driven, wanted)
    assert sorted(slow.texts) == sorted([digits(3), digits(4), GRAMMAR]), "two were begun"


@pytest.mark.parametrize("seed", range(20))
def test_what_somebody_waits_for_is_compiled_once_and_nothing_else(seed: int, slow: Slow):
    chance, grammars = np.random.default_rng(seed), Grammars(slow)
    begun = {digits(count) for count in (90, 91)}
    for text in sorted(begun):
        asked(grammars, text)
    slow.wait()
    waiting: list[tuple[Grammar, tuple[GatewayId, str]]] = []
    for _ in range(100):
        if waiting and chance.random() < 0.45:
            grammars.leave(*waiting.pop(int(chance.integers(len(waiting)))))
        else:
            party = (ONE, OTHER)[int(chance.integers(2))]
            waiting.append((asked(grammars, digits(int(chance.integers(3, 15))), party), party))
    wanted = {grammar.text for grammar, _ in waiting}
    slow.finish(grammars, len(wanted) + len(begun))
    assert sorted(slow.texts) == sorted(wanted | begun)
    assert all(grammar.done and not grammar.error for grammar, _ in waiting)
    assert grammars.close(30)


def test_a_party_with_too_many_in_the_queue_is_refused_and_no_other(slow: Slow):
    grammars = Grammars(slow)
    texts = iter(range(3, 10_000))
    while grammars.ask(str(text := next(texts)), ONE) is not None:
        assert text < 5_000, "there is no bound"
    asked(grammars, GRAMMAR, OTHER)
    while grammars.ask(str(text := next(texts)), (GatewayId(2), str(text))) is not None:
        assert text < 9_000, "there is no bound"
    grammars.close(0)


def test_a_request_for_a_grammar_too_many_is_refused_just_now(slow: Slow):
    driven, grammars = driven_with(slow)
    count = 0
    while not driven.failures:
        driven.submit(PROMPT, 2, grammar=str(count := count + 1))
        driven.take()
        assert count < 5_000
    assert driven.failures[0].code is FailureCode.NOT_NOW
    grammars.close(0)


@pytest.mark.parametrize("error", [ValueError("inside"), MemoryError(), BaseException("a panic")])
def test_an_error_of_the_library_fails_its_request_alone(error: BaseException):
    """A panic of the library is no Exception."""
    broken, errors = digits(5), [error]

    def compile(text: str) -> LLMatcher:
        if text == broken and errors:
            raise errors.pop()
        return GUIDANCE._compile(text)

    driven, grammars = driven_with(compile)
    bad, good = driven.submit(PROMPT, 60, grammar=broken), driven.submit(PROMPT, 60, grammar=GRAMMAR)
    grammars.on_compiled = lambda: None
    while good not in driven.finish or not driven.failures:
        driven.step()
    assert [(failure.handle, failure.code) for failure in driven.failures] == [(bad, FailureCode.UNSUPPORTED)]
    assert driven.failures[0].detail == "its grammar: it could not be compiled"
    assert_matches(driven, good)
    again = driven.submit(PROMPT, 60, grammar=broken)
    grammars.on_compiled = None
    driven.run()
    assert_matches(driven, again, "[0-9]{5}")
    driven.assert_baseline()


def test_nothing_is_compiled_after_the_end(slow: Slow):
    grammars = Grammars(slow)
    queued = [asked(grammars, digits(count)) for count in range(3, 23)]
    slow.wait()
    assert not grammars.close(0), "two are being compiled"
    assert [grammars.ask(text, ONE) for text in (GRAMMAR, queued[-1].text)] == [None, None]
    grammars.leave(queued[-1], ONE)
    for _ in range(2):
        slow.let.release()
    assert grammars.close(30)
    assert sorted(slow.texts) == sorted([digits(3), digits(4)])
