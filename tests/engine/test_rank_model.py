"""Models of several ranks, which are processes that join their products by kernels: together they compute what
`transformers` computes.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.engine.kernels.cpu.shared_ranks import RankSizes
from tests.checkpoints import write_checkpoint
from tests.engine.oracle import Reference, prompts_of
from tests.engine.rank_processes import RankProcesses, rank_processes
from tests.engine.rank_runners import config_of, generate
from tests.engine.test_torch_runner import SHAPES

NUM_TOKENS = 20
LENGTHS = [1, 37, 230]
MAX_ROWS = 512
REFUSED = ("olmo2", "deepseek-v3-halves-odd-heads")  # norms of all heads together, and three heads
SHARED = [name for name in SHAPES if not name.startswith(REFUSED)]


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with rank_processes(4) as started:
        yield started


def sizes_of(directory: Path, size: int, threads: int = 1, item_bytes: int = 4) -> RankSizes:
    config = config_of(directory)
    width = max(config.hidden_size, config.output_size)
    return RankSizes(size, MAX_ROWS, width, config.vocab_size, item_bytes, threads)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SHARED)
def test_two_ranks_compute_what_transformers_computes(name: str, processes: RankProcesses, tmp_path: Path) -> None:
    family, shape = SHAPES[name]
    directory = write_checkpoint(tmp_path / "model", family, **{"vocab_size": 321, **shape})
    prompts, reference = prompts_of(LENGTHS), Reference(directory)
    rows = processes.do(
        sizes_of(directory, 2), generate, directory, str(tmp_path / "socket"), prompts, NUM_TOKENS, chunk=200
    )[0]
    for prompt, row in zip(prompts, rows, strict=True):
        tokens, logprobs = reference.run(prompt, NUM_TOKENS)
        assert row.generated == tokens
        for (sampled, _, top), token, expected in zip(row.logprobs, tokens, logprobs, strict=True):
            assert sampled == pytest.approx(float(expected[token]), abs=1e-4)
            assert top == pytest.approx(expected.topk(4).values.tolist(), abs=1e-4)
