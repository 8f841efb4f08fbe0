"""A model with experts whose router prefers two of them: what a gateway's metrics and `/debug/ledger` say of it."""

import time
from functools import partial
from pathlib import Path

import pytest

from tests.checkpoints import plant
from tests.e2e.conftest import prompt_of, write_model
from tests.e2e.stack import running_stack, wait_until
from tests.e2e.test_pair import GREEDY

WORST = "baton_worker_worst_expert_imbalance"
MEAN = "baton_worker_mean_expert_imbalance"
WORST_RANK = "baton_worker_worst_rank_imbalance"
MEAN_RANK = "baton_worker_mean_rank_imbalance"


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_both_workers_tell_the_imbalance_between_their_experts_and_ranks(ranks: int, tmp_path: Path) -> None:
    """All tokens of the first layer go to 2 of 9 experts, both on rank 0; the others are no worse than that."""
    options = ["--tensor-parallel-size", str(ranks), "--expert-parallel"] if ranks > 1 else []
    directory = write_model(tmp_path / "model", "gpt_oss")
    for expert in (0, 3):
        plant(directory, "model.layers.0.mlp.router.bias", expert, 1e3)
    with running_stack(directory, options=options) as stack:
        gateway = stack.gateway
        assert f"{WORST}{{" not in gateway.get("/metrics")[1], "nothing is known before anything was computed"

        def ask() -> None:
            gateway.client.completions.create(prompt=prompt_of(1, 50), max_tokens=20, **GREEDY)

        def is_told(role: str) -> bool:
            return gateway.metric(WORST, role=role) == 4.5

        ask()
        time.sleep(5.1)
        ask()
        for role in ("prefill", "decode"):
            wait_until(partial(is_told, role), what=f"the word of {role}")
            assert 1 <= gateway.metric(MEAN, role=role) <= 4.5
        for role in ("prefill", "decode") if ranks > 1 else ():
            assert gateway.metric(WORST_RANK, role=role) == 2
            assert 1 <= gateway.metric(MEAN_RANK, role=role) <= 2
        assert (f"{WORST_RANK}{{" in gateway.get("/metrics")[1]) == (ranks > 1)
        for worker in gateway.ledger()["workers"]:
            assert worker["worst_rank_imbalance"] == (2 if ranks > 1 else None)
            assert worker["worst_expert_imbalance"] == 4.5
            assert 1 <= worker["mean_expert_imbalance"] <= 4.5
