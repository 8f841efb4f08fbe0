"""One stage of a model: the rank that has some of its layers, and the memory by which hidden states go from the first
layers' stage to the last layers'.

    stages        2: embedding, first layers      1: layers between      0: last layers, output layer
    piece 0       ─▶ layers, in place ───────────▶ layers, in place ────▶ layers, in place ─▶ hidden states of queries
    piece 1              ─▶ ...                          ─▶ ...                  ─▶ ...

    | number of pieces that stage 1 has handed on | of stage 2 | ... | hidden states of a step's tokens, [T, hidden] |
      a cache line each                                                at a border of pages

All stages map this memory. A step's hidden states have one place in it, which each stage's layers overwrite, so nothing
is copied between stages. A stage begins a piece when the one before has handed it on; each counts the pieces of all
steps, which are the same for all. A step ends when all stages have ended it: then its place is free.

It depends on stores that become visible in their order, as those of x86-64 do; groups are refused elsewhere.
"""

import mmap
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from services.engine.runner.base import StepTokens
from services.engine.runner.pieces import pieces_of

_LINE_WORDS = 8
_LOOKS = 200  # before a stage sleeps between looks; some 40 µs
_LOOK_AGAIN_S = 0.0001

# Runs a piece's tokens over their hidden states, [T, hidden], in place. Returns the hidden states of its queries.
RunPiece = Callable[[StepTokens, Tensor], Tensor]


class Stage:
    """One end of the memory. Stage 0 has the last layers."""

    def __init__(
        self,
        memory: np.ndarray,
        number: int,
        num_stages: int,
        width: int,
        dtype: torch.dtype,
        check: Callable[[], None],
    ) -> None:
        """memory: uint8, as many as `memory_bytes` or more, zeroed before the first stage joins. width: of hidden
        states. check: asked again and again while this stage waits for another one; its error comes through.
        """
        assert 0 <= number < num_stages, (number, num_stages)
        self.number, self.num_stages = number, num_stages
        border, row_bytes = _border_bytes(num_stages), width * dtype.itemsize
        rows = (len(memory) - border) // row_bytes
        self._sent = memory[:border].view(np.int64)[::_LINE_WORDS]  # pieces that each stage has handed on
        self._hidden = torch.from_numpy(memory[border : border + rows * row_bytes]).view(dtype).view(rows, width)
        self._check = check
        self._count = 0  # of pieces that this stage has handed on

    @property
    def is_last(self) -> bool:
        """Returns True if this stage has the last layers, and with them the queries' hidden states."""
        return self.number == 0

    def run(self, tokens: StepTokens, run_piece: RunPiece) -> Tensor | None:
        """Runs this stage's layers on the pieces of a step, each as soon as the stage before has handed it on.

        Returns the hidden states of the step's queries, [Q, width]; None: a later stage has them. Raises what the check
        raises.
        """
        found: Tensor | None = None
        for piece in pieces_of(tokens):
            self._wait()
            of_queries = run_piece(piece.tokens, self._hidden[piece.place])
            self._count += 1
            self._sent[self.number] = self._count
            if self.is_last:
                if found is None:
                    found = of_queries.new_empty(len(tokens.queries), of_queries.shape[1])
                found[torch.from_numpy(piece.queries)] = of_queries
        return found

    def _wait(self) -> None:
        """Waits until the stage before has handed on the next piece."""
        before, looks = self.number + 1, 0
        while before < self.num_stages and self._sent[before] <= self._count:
            self._check()
            looks += 1
            if looks > _LOOKS:
                time.sleep(_LOOK_AGAIN_S)


def memory_bytes(num_stages: int, max_tokens: int, width: int, item_bytes: int) -> int:
    """Returns the bytes of the memory for hidden states of so many tokens."""
    return _border_bytes(num_stages) + max_tokens * width * item_bytes


def _border_bytes(num_stages: int) -> int:
    return -(-num_stages * _LINE_WORDS * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
