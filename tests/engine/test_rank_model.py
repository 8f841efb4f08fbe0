"""Models of several ranks, which are processes that join their products by kernels: together they compute what
`transformers` computes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from services.engine.kernels.cpu.shared_ranks import RankSizes
from tests.checkpoints import write_checkpoint
from tests.engine.models.test_gguf import WIDE, reference_of
from tests.engine.oracle import Reference, prompts_of
from tests.engine.rank_processes import RankProcesses, rank_processes
from tests.engine.rank_runners import config_of, generate, score
from tests.engine.stepping import Row
from tests.engine.test_torch_runner import SHAPES
from tests.gguf_files import write_gguf
from tests.quantized_checkpoints import WAYS, write_mxfp4, write_quantized

NUM_TOKENS = 20
LENGTHS = [1, 37, 230]
MAX_ROWS = 512
INT8_INPUTS = ["w8a8", "w8a8-static"]
CODES = ["w4a16", "mxfp4", "Q4_0", "Q8_0", "Q4_K", "Q6_K"]
CODES += [way for way in WAYS if way not in (*CODES, *INT8_INPUTS)]
REFUSED = ("olmo2", "deepseek-v3-halves-odd-heads")  # norms of all heads together, and three heads
SHARED = [name for name in SHAPES if not name.startswith(REFUSED)]
EXPERTS = "gpt-oss", "mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v2-one", "deepseek-v3"
WITH_EXPERTS = [name for name in SHARED if name.startswith(EXPERTS)]


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with rank_processes(4) as started:
        yield started


def sizes_of(directory: Path, size: int, threads: int = 1, item_bytes: int = 4) -> RankSizes:
    config = config_of(directory)
    width = max(config.hidden_size, config.output_size)
    return RankSizes(size, MAX_ROWS, width, config.vocab_size, item_bytes, threads)


def assert_right(rows: list[Row], reference: Reference, within: float = 1e-4) -> None:
    """Tokens and log-probabilities are the reference's."""
    for row in rows:
        tokens, logprobs = reference.run(row.tokens[: row.num_prompt], NUM_TOKENS)
        assert row.generated == tokens
        for (sampled, _, top), token, expected in zip(row.logprobs, tokens, logprobs, strict=True):
            assert sampled == pytest.approx(float(expected[token]), abs=within)
            assert top == pytest.approx(expected.topk(4).values.tolist(), abs=within)


def generated(processes: RankProcesses, sizes: RankSizes, path: Path, tmp_path: Path, **options: Any) -> list[Row]:
    """Prompts in long chunks, which run by rows, then steps that are recorded."""
    arguments = path, str(tmp_path / "socket"), prompts_of(LENGTHS), NUM_TOKENS
    rows: list[Row] = processes.do(sizes, generate, *arguments, chunk=200, **options)[0]
    return rows


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SHARED)
def test_two_ranks_compute_what_transformers_computes(name: str, processes: RankProcesses, tmp_path: Path) -> None:
    """Of a vocabulary that they cannot share evenly."""
    family, shape = SHAPES[name]
    directory = write_checkpoint(tmp_path / "model", family, **{"vocab_size": 321, **shape})
    assert_right(generated(processes, sizes_of(directory, 2), directory, tmp_path), Reference(directory))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "shape", "size", "threads", "options"),
    [
        ("llama", {}, 4, 2, {}),
        ("qwen2_moe", {"tie_word_embeddings": True}, 4, 1, {}),
        ("llama", {"num_attention_heads": 6, "hidden_size": 96, "num_key_value_heads": 3}, 3, 1, {}),
        ("gpt_oss", {}, 2, 2, {}),
        ("llama", {}, 2, 1, {"fused": False}),
        ("mixtral", {}, 2, 1, {"fused": False}),
        ("llama", {}, 2, 1, {"by_gloo": True}),
        ("mixtral", {}, 4, 2, {"expert_parallel": True}),
        ("qwen2_moe", {"tie_word_embeddings": True}, 4, 1, {"expert_parallel": True}),
        ("gpt_oss", {}, 2, 2, {"fused": False, "expert_parallel": True}),
        ("qwen3_moe", {}, 2, 1, {"by_gloo": True, "expert_parallel": True}),
    ],
)
def test_more_ranks_and_threads_and_other_ways_do_too(
    family: str,
    shape: dict[str, Any],
    size: int,
    threads: int,
    options: dict[str, Any],
    processes: RankProcesses,
    tmp_path: Path,
) -> None:
    directory = write_checkpoint(tmp_path / "model", family, **{"vocab_size": 322, **shape})
    sizes = sizes_of(directory, size, threads)
    assert_right(generated(processes, sizes, directory, tmp_path, **options), Reference(directory))


@pytest.mark.few(1)
@pytest.mark.parametrize("way", CODES)
def test_ranks_multiply_codes(way: str, processes: RankProcesses, tmp_path: Path) -> None:
    """Wherever their shares cut a group, a word or an order of inputs."""
    checkpoint, path = tmp_path / "plain", tmp_path / "quantized"
    if way in GGMLQuantizationType.__members__:
        path = write_gguf(tmp_path / "model.gguf", write_checkpoint(checkpoint, **WIDE), GGMLQuantizationType[way])
    elif way == "mxfp4":
        write_mxfp4(path, write_checkpoint(checkpoint, "gpt_oss"))
    else:
        write_quantized(path, write_checkpoint(checkpoint), WAYS[way])
    reference = reference_of(path) if path.suffix == ".gguf" else Reference(path / "numbers")
    assert_right(generated(processes, sizes_of(path, 2), path, tmp_path), reference, within=5e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("way", INT8_INPUTS)
def test_ranks_round_inputs_to_int8_by_their_part_of_a_row(way: str, processes: RankProcesses, tmp_path: Path) -> None:
    """So that a number is rounded by a scale that is at most that of the whole row: errors are not larger."""
    path = tmp_path / "quantized"
    write_quantized(path, write_checkpoint(tmp_path / "plain"), WAYS[way])
    reference = Reference(path / "numbers")
    for row in generated(processes, sizes_of(path, 2), path, tmp_path):
        expected = reference.run(row.tokens[: row.num_prompt], 1)[1][0]
        _, top_ids, top = row.logprobs[0]
        assert expected[top_ids].tolist() == pytest.approx(top, abs=0.3)


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_ranks_with_whole_experts_compute_what_transformers_computes(
    name: str, size: int, processes: RankProcesses, tmp_path: Path
) -> None:
    """Of as many experts as there are, some ranks have one more. A token may have no expert of a rank."""
    family, shape = SHAPES[name]
    directory = write_checkpoint(tmp_path / "model", family, **{"vocab_size": 321, **shape})
    rows = generated(processes, sizes_of(directory, size), directory, tmp_path, expert_parallel=True)
    assert_right(rows, Reference(directory))


@pytest.mark.long
@pytest.mark.parametrize("way", [*WAYS, "mxfp4"])
def test_ranks_with_whole_experts_multiply_codes(way: str, processes: RankProcesses, tmp_path: Path) -> None:
    """As they are stored: no share cuts them."""
    checkpoint, path = tmp_path / "plain", tmp_path / "quantized"
    if way == "mxfp4":
        write_mxfp4(path, write_checkpoint(checkpoint, "gpt_oss"))
    else:
        write_quantized(path, write_checkpoint(checkpoint, "qwen3_moe", moe_intermediate_size=64), WAYS[way])
    reference = Reference(path / "numbers")
    rows = generated(processes, sizes_of(path, 3), path, tmp_path, expert_parallel=True)
    if way in INT8_INPUTS:  # which are rounded to int8
        for row in rows:
            expected = reference.run(row.tokens[: row.num_prompt], 1)[1][0]
            assert expected[row.logprobs[0][1]].tolist() == pytest.approx(row.logprobs[0][2], abs=0.3)
    else:
        assert_right(rows, reference, within=5e-4)


def test_ranks_score_a_prompt_in_pieces(processes: RankProcesses, tmp_path: Path) -> None:
    """Each piece is gathered for itself; and what is pooled and watched beside needs no logits."""
    directory = write_checkpoint(tmp_path / "model", vocab_size=321)
    (prompt,) = prompts_of([300])
    found = processes.do(sizes_of(directory, 2), score, directory, str(tmp_path / "socket"), prompt)[0]
    expected = Reference(directory).scores(prompt)
    assert found.tolist() == pytest.approx(expected[torch.arange(299), torch.tensor(prompt[1:])].tolist(), abs=1e-4)


def test_a_rank_maps_the_weights_that_another_worker_has_packed(processes: RankProcesses, tmp_path: Path) -> None:
    """Of its part, which it joins with its own ranks."""
    directory, holders = write_checkpoint(tmp_path / "model"), tmp_path / "holders"
    holders.mkdir(mode=0o700)
    for _ in range(2):  # the second ones map what the first ones have
        (tmp_path / "socket.1").unlink(missing_ok=True)
        rows = generated(processes, sizes_of(directory, 2), directory, tmp_path, holders=holders)
        assert_right(rows, Reference(directory))
