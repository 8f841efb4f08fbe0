"""Faults that are put into a worker's process before it begins: none can be brought about from outside."""

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

POISON = 3999  # the first token of a prompt that ends the engine which computes it
FAULT_SIGNAL = signal.SIGRTMIN + 1  # one that no service takes for itself
_DAY_S = 86_400.0


def fail_on_poison() -> None:
    """Makes the engine fail in the step that computes a poisonous prompt."""
    from services.engine.engine import Engine
    from services.engine.launch import Launched
    from services.engine.schedulers.base import StepPlan

    launch = Engine._launch

    def checked(engine: Engine, plan: StepPlan, now: float, on_computing: Callable[[], None] | None) -> Launched:
        batch = engine.sequences.batch
        if any(batch.request(int(slot)).capsule.token_ids[0] == POISON for slot in plan.slots):
            raise RuntimeError("a prompt that the engine cannot compute")
        return launch(engine, plan, now, on_computing)

    setattr(Engine, "_launch", checked)  # noqa: B010  # mypy knows no methods that are replaced


def hang_on_signal() -> None:
    """Makes the engine hang for ever in its first step after FAULT_SIGNAL, while the rest of the process goes on."""
    from services.engine.engine import Engine
    from services.engine.launch import Launched
    from services.engine.schedulers.base import StepPlan

    launch, hangs = Engine._launch, threading.Event()

    def checked(engine: Engine, plan: StepPlan, now: float, on_computing: Callable[[], None] | None) -> Launched:
        while hangs.is_set():
            time.sleep(1)
        return launch(engine, plan, now, on_computing)

    setattr(Engine, "_launch", checked)  # noqa: B010  # likewise
    signal.signal(FAULT_SIGNAL, lambda *_: hangs.set())


def speak_version(major: int, minor: int) -> None:
    """Makes the worker say that it speaks another version of the protocol."""
    from services.protocol.messages import WorkerHello
    from services.worker import gateway_servicer

    hello = partial(WorkerHello, protocol_major=major, protocol_minor=minor)
    setattr(gateway_servicer, "WorkerHello", hello)  # noqa: B010  # likewise


def jump_on_signal(told: Path) -> None:
    """Sets the wall clock of the process a day back, and with the next FAULT_SIGNAL two days ahead.

    told: gets a line for each jump.
    """
    now, offsets = time.time, [2 * _DAY_S, -_DAY_S]

    def jump(_number: int, _frame: object) -> None:
        offset = offsets.pop() if offsets else 0.0
        time.time = lambda: now() + offset
        with told.open("a") as lines:
            lines.write(f"the wall clock of {os.getpid()} jumps by {offset:g} s\n")

    signal.signal(FAULT_SIGNAL, jump)
