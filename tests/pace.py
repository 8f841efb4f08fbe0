"""A least time for each step of an engine: what a test does to a request under way, it does before the request ends.

On a fast machine 400 tokens of a tiny model would be over sooner than a test can kill, drain or abort anything.
"""

import time
from collections.abc import Callable

STEP_S = 0.001


class Pace:
    """Holds back steps that would begin sooner than step_s after the step before. A slow machine does not notice it.

    step_s: STEP_S, until a test whose requests are to outlast all that it does sets a longer time.
    """

    def __init__(self) -> None:
        self.step_s = STEP_S
        self._next = 0.0

    def keep(self) -> None:
        """Returns when the next step may begin."""
        now = time.monotonic()
        if now < self._next:
            time.sleep(self._next - now)
            now = time.monotonic()
        self._next = now + self.step_s


def pace_engines() -> None:
    """Gives every engine of this process, which has none yet, the least time."""
    from services.engine.engine import Engine
    from services.engine.launch import Launched
    from services.engine.schedulers.base import StepPlan

    launch, pace = Engine._launch, Pace()

    def paced(engine: Engine, plan: StepPlan, now: float, on_computing: Callable[[], None] | None) -> Launched:
        pace.keep()
        return launch(engine, plan, now, on_computing)

    setattr(Engine, "_launch", paced)  # noqa: B010  # mypy knows no methods that are replaced
