"""What a forward pass is told of a step's rows."""

from typing import Any

import pytest

from services.engine.models.base import ModelInput
from services.engine.runner.base import Runner, StepInput
from tests.engine.oracle import prompts_of
from tests.engine.stepping import run_greedy


def assert_told_where_rows_begin(runner: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps of prompts, beside them, and of single tokens. Rows that pad a recorded step lie behind the others."""
    told: list[list[int]] = []
    num_told = 0
    launch = runner.launch

    def noting(name: str) -> None:
        run = getattr(model, name)

        def noted(step: ModelInput) -> Any:
            told.append(step.row_starts.tolist())
            assert told[-1][-1] == len(step.token_ids)
            return run(step)

        monkeypatch.setattr(model, name, noted)

    def checked(step: StepInput) -> None:
        nonlocal num_told
        told.clear()
        launch(step)
        starts = step.tokens.query_starts.tolist()
        if told:  # a GPU replays a step without a call
            num_told += 1
            assert told[-1][: len(starts)] == starts

    noting("forward")
    noting("all_logits")
    monkeypatch.setattr(runner, "launch", checked)
    greedy: Runner = runner
    run_greedy(greedy, prompts_of([20, 5, 9]), 3, chunk=8)
    assert num_told > 3
