"""Makes a rank compute nonsense, be slow, or hang, once it gets a signal. Python imports this first in a process whose
PYTHONPATH has this folder: ranks are processes of their own, in which a test cannot change anything otherwise.
"""

import signal
import sys
import time
from typing import Any

SIGNAL, BE_SLOW, HANG = (signal.SIGRTMIN + number for number in (1, 2, 3))  # no process of Baton takes them for itself
SLOW_S = 0.03  # of each step


def _compute_nonsense(_number: int, _frame: Any) -> None:
    from services.engine.models.embedding import Embedding

    looked_up = Embedding._rows

    def not_numbers(embedding: Embedding, tokens: Any) -> Any:
        return looked_up(embedding, tokens).fill_(float("nan"))

    setattr(Embedding, "_rows", not_numbers)  # noqa: B010  # mypy knows no methods that are replaced


def _be_slow(_number: int, _frame: Any) -> None:
    from services.engine.runner.cpu.torch_runner import TorchRunner

    follow = TorchRunner.follow

    def follow_late(runner: TorchRunner, *arguments: Any, **named: Any) -> None:
        time.sleep(SLOW_S)
        follow(runner, *arguments, **named)

    setattr(TorchRunner, "follow", follow_late)  # noqa: B010


def _hang(_number: int, _frame: Any) -> None:
    while True:
        time.sleep(1)


if "services.engine.runner.group.rank_main" in sys.orig_argv:
    signal.signal(SIGNAL, _compute_nonsense)
    signal.signal(BE_SLOW, _be_slow)
    signal.signal(HANG, _hang)
