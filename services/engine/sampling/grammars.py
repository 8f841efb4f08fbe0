"""The grammars that requests wait for: threads compile them, in turns between those who ask.

A request has its grammar from the time when it is queued, so that a look at it is one attribute. A grammar that no
thread has begun leaves the queue with the last request that waits for it. The turns are between parties: the tenants of
each gateway. So what one of them asks for waits for no more of another's grammars than there are threads.

A grammar that a thread has begun cannot be stopped. The library's own limits end it: some seconds at most, where a
gateway has let it pass that had no time to lose.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import llguidance
import structlog

from kvtransfer.ids import GatewayId

Party = tuple[GatewayId, str]  # a gateway, and one of its tenants

_THREADS = 2
_MAX_KEPT = 256  # compiled grammars, each with what is known of its states so far
_MAX_OPEN = 2048  # grammars that are queued or being compiled
_MAX_QUEUED = 512  # of one party

log = structlog.get_logger()


class Grammar:
    """One grammar, in one of llguidance's notations; `done` once it is compiled, or cannot be.

    error: why no answer can match it, once it is done; empty: answers can.
    waiting: requests of each party, as long as it is queued. Its `Grammars` changes that, and `begun`.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.error = ""
        self.begun = False  # it is not queued any more
        self.waiting: Counter[Party] = Counter()
        self._compiled: Future[llguidance.LLMatcher | None] = Future()

    @property
    def done(self) -> bool:
        """True once there is a matcher or an error."""
        return self._compiled.done()

    def wait(self) -> None:
        """Waits until it is done."""
        self._compiled.result()

    def matcher(self) -> llguidance.LLMatcher:
        """Returns a matcher at the beginning of all answers, of the caller's own. Waits for it; there is no error."""
        compiled = self._compiled.result()
        assert compiled is not None
        return compiled.deep_copy()

    def compile(self, matcher_of: Callable[[str], llguidance.LLMatcher]) -> bool:
        """Makes it done; False: the library failed, so that another time may go better."""
        matcher = None
        try:
            matcher = matcher_of(self.text)
            self.error = matcher.get_error()
        except BaseException as error:  # a panic of the library is no Exception; it must fail these requests only
            log.error("a grammar cannot be compiled", exc_info=error)
            matcher, self.error = None, "it could not be compiled"
        self._compiled.set_result(matcher)
        return matcher is not None


class Grammars:
    """Compiles grammars by `matcher_of`, on threads of its own, and keeps those that were used last."""

    def __init__(self, matcher_of: Callable[[str], llguidance.LLMatcher]) -> None:
        self._matcher_of = matcher_of
        self._lock = threading.Condition()  # notified when a thread has nothing to do
        self._open: dict[str, Grammar] = {}  # that are not done
        self._queues: OrderedDict[Party, dict[Grammar, None]] = OrderedDict()  # the party whose turn is next first
        self._kept: OrderedDict[str, Grammar] = OrderedDict()  # that are done, least recently used first
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._num_running = 0  # threads that compile
        self.closed = False  # nothing more is compiled
        self.on_compiled: Callable[[], None] | None = None  # called on any thread

    def ask(self, text: str, party: Party) -> Grammar | None:
        """Returns a grammar, which is queued if it is new; None: too many are, or this is closed.

        One `leave` goes with each.
        """
        with self._lock:
            if (kept := self._kept.get(text)) is not None:
                self._kept.move_to_end(text)
                return kept
            if self.closed:
                return None
            grammar = self._open.get(text)
            if grammar is None:
                full = len(self._open) >= _MAX_OPEN or len(self._queues.get(party, ())) >= _MAX_QUEUED
                if full:
                    return None
                grammar = self._open[text] = Grammar(text)
            if not grammar.begun:
                grammar.waiting[party] += 1
                self._queues.setdefault(party, {})[grammar] = None
                self._start_thread()
            return grammar

    def leave(self, grammar: Grammar, party: Party) -> None:
        """Takes a grammar out of the queue if no other request waits for it. Changes nothing once it is begun."""
        with self._lock:
            if grammar.begun:
                return
            grammar.waiting[party] -= 1
            if not grammar.waiting[party]:
                del grammar.waiting[party]
                self._unqueue(grammar, party)
            if not grammar.waiting:
                del self._open[grammar.text]

    def close(self, timeout_s: float) -> bool:
        """Compiles nothing more; returns whether what is being compiled was done within `timeout_s`."""
        with self._lock:
            self.closed = True
            self._queues.clear()
            self._threads.shutdown(wait=False)
            return self._lock.wait_for(lambda: not self._num_running, timeout_s)

    def _start_thread(self) -> None:
        if self._num_running < _THREADS:
            self._num_running += 1
            self._threads.submit(self._run)

    def _run(self) -> None:
        while (grammar := self._next()) is not None:
            keep = grammar.compile(self._matcher_of)
            with self._lock:
                del self._open[grammar.text]
                if keep:
                    self._kept[grammar.text] = grammar
                if len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
            if self.on_compiled is not None:
                self.on_compiled()

    def _next(self) -> Grammar | None:
        """Takes the first grammar of the party whose turn it is; None: the thread has nothing to do."""
        with self._lock:
            if not self._queues:
                self._num_running -= 1
                self._lock.notify_all()
                return None
            party, queue = next(iter(self._queues.items()))
            self._queues.move_to_end(party)
            grammar = next(iter(queue))
            grammar.begun = True
            for waiting in grammar.waiting:
                self._unqueue(grammar, waiting)
            return grammar

    def _unqueue(self, grammar: Grammar, party: Party) -> None:
        if (queue := self._queues.get(party)) is not None:  # None: closed
            del queue[grammar]
            if not queue:
                del self._queues[party]
