"""The engine thread: the only one that touches the worker's core.

Others put calls into its inbox; what comes out leaves by two callbacks, in order. While there is work it steps; while
there is none it sleeps until a call comes, with a slow tick for leases and deadlines and a heartbeat for gateways. On
cores that are shared with another worker, decoding may have to pause between two steps; everything else goes on then.

What a step brought for gateways is held while the next step is prepared, which takes a decode step less than a
millisecond. To send it, the event loop needs the interpreter lock, which this thread needs as well until then: on 2
cores of a Xeon, a step of 64 sequences of an 82M Llama came every 31.2 ms if its tokens were sent at once, and every
30.5 ms if they were held. What other workers or transports wait for is never held.
"""

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

import structlog

from services.engine.kernels.ranks import RankLostError
from services.engine.self_check import SelfCheckError
from services.worker.core.core import WorkerCore
from services.worker.core.state import CoreOutputs

CoreCall = Callable[[WorkerCore, float], None]

# For the process that runs one. The engine issues many small torch operations, and each gives the interpreter lock
# away; with Python's default of 5 ms a busy event loop would keep it that long every time.
SWITCH_INTERVAL_S = 0.0005

_TICK_S = 0.05  # resolution of deadlines, leases and graces
_HEARTBEAT_S = 1.0

log = structlog.get_logger()


def no_pause() -> float:
    """Returns 0: no pause, for a worker that shares its device with nobody."""
    return 0.0


class EngineThread:
    """Runs a core. `on_outputs` is called on this thread, and must not block; `on_fatal` as well.

    decode_pause_s: asked before each step that only decodes, on this thread. The step waits for as many seconds, or for
    a call if one comes sooner, and asks again.
    """

    def __init__(
        self,
        core: WorkerCore,
        on_outputs: Callable[[CoreOutputs, bool], None],
        on_fatal: Callable[[str], None],
        decode_pause_s: Callable[[], float] = no_pause,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._on_outputs = on_outputs
        self._on_fatal = on_fatal
        self._inbox: SimpleQueue[CoreCall | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._next_tick = 0.0
        self._next_heartbeat = 0.0
        self._said_idle = False
        self._busy = False
        self._decode_pause_s = decode_pause_s
        self._pause_s = 0.0
        self._held: tuple[CoreOutputs, bool] | None = None  # arguments of `on_outputs`
        self._clock = clock
        self.num_rounds = 0  # that have ended; this and the next two are for EngineWatch
        self.longest_round_s = 0.0
        self.resting = False  # the thread waits for a call

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def call(self, call: CoreCall) -> None:
        """Queues a call for the engine thread, between two steps. Calls from one thread keep their order."""
        self._inbox.put(call)

    def stop(self, timeout_s: float | None = None) -> bool:
        """Ends the thread after the step it is in; returns whether it ended within `timeout_s`."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._take_calls(self._wait_s()):
                began = self._clock()
                self.round()
                self.num_rounds += 1
                self.longest_round_s = max(self.longest_round_s, self._clock() - began)
            self._send_held()
        except (SelfCheckError, RankLostError) as error:
            self._send_held()
            self._on_fatal(str(error))
        except Exception:
            # A failed step leaves garbage in blocks that others may read: this worker_id is over.
            log.exception("the engine failed")
            self._send_held()
            self._on_fatal("the engine failed")

    def round(self) -> None:
        """Does one round of the thread, after the calls: clock, one step or a pause, outputs."""
        now = self._clock()
        self._tick(now)
        self._core.reserve(now)
        if self._core.is_awaited:  # a step takes long: what can go on beside it does not wait for its end
            self._flush(now)
        self._pause_s = self._decode_pause_s() if self._core.only_decodes else 0.0
        if not self._pause_s:
            self._busy = self._core.step(now, self._send_held)
        self._flush(self._clock())

    def _take_calls(self, wait_s: float) -> bool:
        """Makes all calls there are, after waiting for the first one; False when it is time to end."""
        try:
            self.resting = wait_s > 0
            call = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            self.resting = False
            while call is not None:
                call(self._core, self._clock())
                call = self._inbox.get_nowait()
        except Empty:
            self.resting = False
            return True
        return False

    def _wait_s(self) -> float:
        """Returns the seconds to sleep if no call comes."""
        if self._pause_s:
            return self._pause_s
        if self._busy:
            return 0.0
        return _HEARTBEAT_S if self._said_idle else _TICK_S

    def _tick(self, now: float) -> None:
        if now < self._next_tick:
            return
        self._next_tick = now + _TICK_S
        self._core.tick(now)
        if (reason := self._core.why_start_afresh(now)) is not None:
            self._on_fatal(f"{reason}: starting afresh")

    def _flush(self, now: float) -> None:
        """Hands the outputs on; those of a step after which another may follow are held. Gateways hear of the load with
        every frame, once a second, and when all is done.
        """
        idle = self._core.idle
        heartbeat = now >= self._next_heartbeat or (idle and not self._said_idle)
        self._said_idle = idle
        outputs = self._core.take_outputs(now, heartbeat=heartbeat)
        if heartbeat:
            self._next_heartbeat = now + _HEARTBEAT_S
        self._send_held()
        self._held = outputs, self._core.has_leases
        if outputs.are_awaited or not self._busy or self._pause_s:
            self._send_held()

    def _send_held(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            self._on_outputs(*held)
