"""Which rank of a group the others wait for."""

import os
from pathlib import Path

import numpy as np
import psutil
import pytest

from services.engine.runner.base import SlowestRank
from services.engine.runner.group import slowest_rank
from services.engine.runner.group.group_runner import GroupRunner
from services.engine.runner.group.slowest_rank import RankWaits, slowest
from tests.checkpoints import write_checkpoint
from tests.engine.group.test_group_runner import a_step, engine_of, loaded, ranks_of, run
from tests.faults.rank_hooks import sitecustomize
from tests.faults.rank_hooks.sitecustomize import BE_SLOW, SLOW_S

HOOKS = Path(sitecustomize.__file__).parent


def test_the_slowest_waits_least() -> None:
    assert slowest(10.0, [4.0, 1.0, 3.0]) == SlowestRank(1, 0.25)
    assert slowest(10.0, [0.5, 0.5]) == SlowestRank(0, 0.0)
    assert slowest(1.0, [0.0, 1.5]).waited == 1.0, "a wait may be counted with the step after it"


def test_waits_are_of_the_last_minute_of_steps() -> None:
    waits = RankWaits()
    assert waits.latest is None
    waited = np.zeros(2)
    for second in range(200):
        waited[int(second < 100)] += 0.5  # in the first hundred seconds rank 1 waits, then rank 0
        if waits.add_step(1.0):
            waits.note(list(waited))
        if second == 99:
            assert waits.latest == SlowestRank(0, 0.5)
    assert waits.latest == SlowestRank(1, 0.5)


@pytest.mark.long
def test_a_rank_that_is_slow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, "llama")
    monkeypatch.setattr(slowest_rank, "_EVERY_S", 0.5)
    monkeypatch.setattr(slowest_rank, "_WINDOW_S", 1.0)
    monkeypatch.setenv("PYTHONPATH", f"{HOOKS}:{Path.cwd()}")
    with loaded(engine_of(tmp_path, tensor_parallel_size=2)) as model:
        runner = model.runner
        assert isinstance(runner, GroupRunner)
        assert model.group is runner
        [rank] = ranks_of(psutil.Process())
        os.kill(rank.pid, BE_SLOW)
        for _ in range(int(5.0 / SLOW_S)):
            run(runner, a_step(np.arange(9), 0))
        found = runner.slowest_rank
        assert found is not None
        assert found.rank == 1
        assert 0.5 < found.waited <= 1.0
