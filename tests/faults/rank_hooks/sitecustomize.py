"""Makes a rank compute nonsense once it gets a signal. Python imports this first in a process whose PYTHONPATH has this
folder: ranks are processes of their own, in which a test cannot change anything otherwise.
"""

import signal
import sys
from typing import Any

SIGNAL = signal.SIGRTMIN + 1  # one that no process of Baton takes for itself


def _compute_nonsense(_number: int, _frame: Any) -> None:
    from services.engine.models.embedding import Embedding

    looked_up = Embedding._rows

    def not_numbers(embedding: Embedding, tokens: Any) -> Any:
        return looked_up(embedding, tokens).fill_(float("nan"))

    setattr(Embedding, "_rows", not_numbers)  # noqa: B010  # mypy knows no methods that are replaced


if "services.engine.runner.group.rank_main" in sys.orig_argv:
    signal.signal(SIGNAL, _compute_nonsense)
