"""What measures on a card, run on a tiny model in Triton's interpreter: rows are whole, and floors are what they should
be. Nobody looks at the seconds.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from loadtest.gpu import cascade, coded, correctness, decode, experts, latents, peer, prefill, warm_up
from loadtest.gpu.bench_model import FP8, BenchModel, load
from loadtest.gpu.card import Card
from loadtest.gpu.shapes import LLAMA_3_8B, OPT_125M
from services.engine.attention.latent import Latent
from services.engine.kernels.routing_numbers import RoutingNumbers
from services.engine.quantization.codes import Code
from services.engine.runner.gpu.device import CudaDevice, HostDevice
from tests.loadtest.tiny_shapes import TINY_LLAMA
from tests.machine import NO_GPU, needs

SHAPE = {**TINY_LLAMA, "num_hidden_layers": 1, "torch_dtype": "bfloat16"}
VOCAB, HIDDEN, INTER = 320, 64, 96
# q, k, v, o; gate, up, down; the norms; then the last norm
LAYER = HIDDEN * (64 + 32 + 32) + 64 * HIDDEN + 3 * HIDDEN * INTER + 2 * HIDDEN
PARAMETERS = LAYER + HIDDEN + 2 * VOCAB * HIDDEN
KV_BYTES = 2 * 2 * 16 * 2  # of a token: K and V, heads, head_dim, bfloat16
CARD = Card("made up", 2, total_bytes=100 << 30, bytes_per_s=1e9, flops_per_s=1e12)


@pytest.fixture(scope="module")
def model() -> BenchModel:
    return load("tiny", SHAPE, CudaDevice() if torch.cuda.is_available() else HostDevice())


def test_a_decode_step_s_floor_is_what_it_reads(model: BenchModel) -> None:
    row: Any
    (row,) = decode.measure(model, CARD, [(2, 64)], rounds=2)
    assert (row["model"], row["batch"], row["context"], row["kv"]) == ("tiny", 2, 64, "bfloat16")
    assert row["kv_gib"] == 2 * 64 * KV_BYTES / 2**30
    read = (PARAMETERS - VOCAB * HIDDEN) * 2 + 2 * 64 * KV_BYTES  # the embedding is not read
    assert row["floor_ms"] == pytest.approx(read / 1e9 * 1e3)
    assert row["of_floor"] == pytest.approx(row["floor_ms"] / row["step_ms"])
    assert row["tokens_per_s"] == pytest.approx(2 / row["step_ms"] * 1e3)
    assert row["cpu_ms"] > 0


def test_kv_that_does_not_fit_is_skipped_with_its_size_and_tried_in_fp8(model: BenchModel) -> None:
    room = model.weight_bytes + (6 << 30) + 2 * 64 * KV_BYTES
    small = Card("made up", 2, total_bytes=room, bytes_per_s=1e9, flops_per_s=1e12)
    skipped: Any
    fp8: Any
    skipped, fp8 = decode.measure(model, small, [(2, 64)], rounds=1)
    assert skipped["skipped"] == "its KV does not fit"
    assert skipped["kv_gib"] == 2 * 64 * KV_BYTES / 2**30
    assert "step_ms" not in skipped
    assert (fp8["kv"], fp8["kv_gib"]) == ("float8_e4m3fn", skipped["kv_gib"] / 2)
    assert fp8["step_ms"] > 0


def test_experts_read_each_that_was_chosen_once(model: BenchModel) -> None:
    layer = experts.Layer("tiny", RoutingNumbers(4, 4), 32, 16)  # all of them, whatever the logits are

    def seconds_of(body: Callable[[], object]) -> float:
        body()
        return 1e-3

    row: Any
    (row,) = experts.measure(CARD, model.device.torch, [layer], [3], seconds_of)
    assert (row["layer"], row["tokens"], row["experts"], row["us"]) == ("tiny", 3, 4, 1000)
    assert row["of_copy_bandwidth"] == pytest.approx(4 * 3 * 32 * 16 * 2 / 1e-3 / 1e9)
    assert row["of_matrix_rate"] == pytest.approx(2 * 3 * 4 * 3 * 32 * 16 / 1e-3 / 1e12)


def test_codes_are_measured_beside_bfloat16(model: BenchModel) -> None:
    taken = iter((4e-3, 1e-3, 6e-3, 2e-3))

    def seconds_of(body: Callable[[], object]) -> float:
        body()
        return next(taken)

    way, row, of_experts = coded.Way(Code.UINT4, 32, has_offsets=True), dict[str, Any](), dict[str, Any]()
    (row,) = coded.measure(CARD, model.device.torch, [(48, 64)], [3], [way], seconds_of)
    assert (row["stored"], row["rows"], row["us"], row["times_bfloat16"]) == ("uint4 by 32 with offsets", 3, 1000, 4)
    assert row["of_copy_bandwidth"] == pytest.approx(48 * 64 * (0.5 + 4 / 32) / 1e-3 / 1e9)
    assert row["of_matrix_rate"] == pytest.approx(2 * 3 * 48 * 64 / 1e-3 / 1e12)
    layer = coded.Layer("tiny", RoutingNumbers(4, 4), 32, 64)
    (of_experts,) = coded.measure_experts(CARD, model.device.torch, [layer], [3], [way], seconds_of)
    assert (of_experts["tokens"], of_experts["us"], of_experts["times_bfloat16"]) == (3, 2000, 3)
    assert of_experts["of_copy_bandwidth"] == pytest.approx(4 * 3 * 32 * 64 * (0.5 + 4 / 32) / 2e-3 / 1e9)
    assert of_experts["of_matrix_rate"] == pytest.approx(2 * 3 * 4 * 3 * 32 * 64 / 2e-3 / 1e12)


@pytest.mark.parametrize(
    ("cell", "form"), [(latents.Cell(2, 1, 40), "absorbed"), (latents.Cell(1, 50, 60), "expanded")]
)
def test_latents_count_what_is_read_and_multiplied(model: BenchModel, cell: latents.Cell, form: str) -> None:
    latent = Latent(kv_rank=24, q_rank=None, nope_dim=16, rope_dim=8, value_dim=16, is_interleaved=True, score_factor=1)

    def seconds_of(body: Callable[[], object]) -> float:
        body()
        return 1e-3

    row: Any
    (row,) = latents.measure(CARD, model.device, [latents.Shape("tiny", 3, latent)], [cell], seconds_of)
    assert (row["shape"], row["form"], row["us"]) == ("tiny", form, 1000)
    read = (cell.rows * cell.context * 32 + 3 * 32 * 24) * 2
    assert row["of_copy_bandwidth"] == pytest.approx(read / 1e-3 / 1e9)
    if form == "absorbed":
        products: float = 3 * (2 * 32 * 24 + 2 * 40 * (32 + 24))
    else:
        products = 3 * (60 * 32 * 24 + (50 * 60 - 50 * 49 / 2) * (24 + 16))
    assert row["of_matrix_rate"] == pytest.approx(2 * products / 1e-3 / 1e12)


def test_cells_with_a_budget_come_first_and_none_is_longer_than_the_model() -> None:
    cells = decode.default_cells(LLAMA_3_8B["max_position_embeddings"])
    assert cells[:2] == [(64, 4096), (256, 4096)]
    assert len(cells) == len(set(cells)) == 12
    assert {context for _, context in decode.default_cells(OPT_125M["max_position_embeddings"])} == {512, 2048}


@pytest.mark.long
def test_a_prompt_s_products_are_counted(model: BenchModel) -> None:
    row: Any
    (row,) = prefill.measure(model, CARD, prompts=[2048, 48], rounds=1)  # the first is too long for it
    layers = LAYER + HIDDEN
    products = 2 * layers * 48 + 2 * 4 * 16 * 48 * 48 + 2 * VOCAB * HIDDEN
    assert row["tflops"] == pytest.approx(products / row["step_ms"] * 1e3 / 1e12)
    assert row["of_matrix_rate"] == pytest.approx(row["tflops"])
    assert row["tokens_per_s"] == pytest.approx(48 / row["step_ms"] * 1e3)


@pytest.mark.long
def test_the_same_step_with_and_without_a_shared_prefix(model: BenchModel) -> None:
    rows: Any = list(cascade.measure(model, batch=2, shared=64, own=16, rounds=1))
    assert [row["cascade"] for row in rows] == ["no", "yes"]
    assert [row["times_faster"] for row in rows] == [1.0, pytest.approx(rows[0]["step_ms"] / rows[1]["step_ms"])]


@pytest.mark.long
def test_transformers_runs_the_same_shape(model: BenchModel) -> None:
    rows: Any = list(peer.measure(model, SHAPE, cells=[(2, 32)], prompt=32, rounds=1))
    assert [row["what"] for row in rows] == ["decode 2 x 32", "prefill 32"]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["transformers_ms"] / row["baton_ms"])
    config = peer.peer_config(SHAPE)
    assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (1, 2, 16)
    assert config.rope_parameters["rope_theta"] == SHAPE["rope_theta"]


@pytest.mark.few(1)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
def test_kernels_are_compiled_for_kv_of_any_dtype(
    model: BenchModel, allow_trial_steps: Callable[[], None], kv_dtype: torch.dtype
) -> None:
    row: Any
    (row,) = warm_up.measure(model, kv_dtype, batch=2, num_tokens=32)
    allow_trial_steps()
    assert row["kv"] == str(kv_dtype).removeprefix("torch.")
    assert row["seconds"] > 0


def test_a_case_beyond_its_bound_is_named_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.gpu.checks import rows
    from tests.gpu.checks.result import Check

    found = [Check("exact", 0.0, 0.0), Check("near", 0.9, 1.0), Check("wrong", float("nan"), 1.0)]
    monkeypatch.setattr(rows, "check", lambda device, seed, num_cases: found)
    row, *notes = correctness.measure("rows", torch.device("cpu"), seed=7, seconds=0.0)
    assert isinstance(row, dict)
    assert (row["kernels"], row["from_seed"], row["cases"], row["failed"], row["worst"]) == ("rows", 7, 3, 1, "wrong")
    assert notes == ["beyond its bound: wrong: nan > 1"]
    assert correctness.summary("rows", 7, found[:2])["worst"] == "near"


@needs(NO_GPU)
def test_a_kernel_that_writes_beside_its_tensors_fails(own_memory: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from services.engine.kernels.gpu.rows import quantize_rows_into
    from tests.gpu.checks import rows
    from tests.gpu.checks.result import Check

    def check(device: torch.device, seed: int, num_cases: int) -> list[Check]:
        quantize_rows_into(torch.ones(4, 8), torch.empty(4, 8, dtype=torch.float8_e4m3fn), torch.empty(4, 1)[:2])
        return [Check("fine", 0.0, 1.0)]

    monkeypatch.setattr(rows, "check", check)
    row, *notes = correctness.measure("rows", torch.device("cpu"), seed=7, seconds=0.0)
    assert isinstance(row, dict)
    assert row["failed"] == 1
    assert notes == ["beyond its bound: quantize_kernel: write outside of its tensors: 1 > 0"]
    own_memory.clear()
