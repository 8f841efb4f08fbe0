"""The whole model with weights as codes: what GpuRunner computes with them is what a CPU does with their numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Mxfp4Config

from services.config import Quantization
from services.engine.kernels.gpu.stacked_experts import CodedExperts
from services.engine.models.architectures import parse_model_config
from services.engine.models.experts import ExpertsMlp
from services.engine.models.registry import load_weights, open_tensors
from services.engine.models.weights import DecoderWeights
from services.engine.quantization.codes import Code, Inputs
from services.engine.quantization.kept import KeptForms
from services.engine.runner.base import spare_blocks
from services.engine.runner.cpu.torch_runner import TorchRunner
from services.engine.runner.gpu.device import CudaDevice, Device, HostDevice
from services.engine.runner.gpu.gpu_runner import GpuRunner, StepLimits
from services.engine.runner.gpu.makers import makers_for
from services.engine.runner.load_plan import kv_layout
from services.protocol.model_files.open import open_model
from tests.checkpoints import write_checkpoint
from tests.engine.oracle import Reference, prompts_of
from tests.engine.stepping import Row, run_greedy
from tests.gpu.coded_tensors import CodedTensors
from tests.quantized_checkpoints import WAYS as WAYS_OF_FILES
from tests.quantized_checkpoints import write_mxfp4, write_quantized

_AS_THEY_ARE = Inputs.AS_THEY_ARE
_NUM_BLOCKS, _BLOCK_SIZE = 64, 16
_HOPPER, _AMPERE, _TURING = (9, 0), (8, 0), (7, 5)
Ways = dict[str, tuple[Code, int, Inputs]]

WAYS: dict[str, tuple[str, dict[str, Any], Ways]] = {
    "llama-several-kinds-in-a-product": (
        "llama",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 1},
        {
            "q_proj": (Code.UINT4, 32, _AS_THEY_ARE),
            "k_proj": (Code.E4M3, 1000, _AS_THEY_ARE),
            "v_proj": (Code.INT8, 1000, _AS_THEY_ARE),
            "down_proj": (Code.E2M1, 32, _AS_THEY_ARE),
            "": (Code.UINT4, 64, _AS_THEY_ARE),
        },
    ),
    "qwen3-moe": ("qwen3_moe", {"num_experts": 5}, {"": (Code.UINT4, 32, _AS_THEY_ARE)}),
    "mixtral-e2m1": ("mixtral", {}, {"": (Code.E2M1, 16, _AS_THEY_ARE)}),
    "qwen2-moe-e4m3": ("qwen2_moe", {"decoder_sparse_step": 2}, {"": (Code.E4M3, 1000, _AS_THEY_ARE)}),
    "deepseek-v3": ("deepseek_v3", {"num_hidden_layers": 3}, {"": (Code.E4M3, 1000, _AS_THEY_ARE)}),
}


def on_gpu(
    directory: Path,
    ways: Ways | None,
    dtype: torch.dtype,
    capability: tuple[int, int] = _HOPPER,
    kept: KeptForms | None = None,
) -> GpuRunner:
    """Makes a runner with weights as codes, on a GPU where there is one. ways: None: the checkpoint has codes."""
    device: Device = CudaDevice() if torch.cuda.is_available() else HostDevice()
    config = parse_model_config(open_model(directory).config())
    with open_tensors(directory, config, device.torch) as source:
        tensors = source if ways is None else CodedTensors(source, ways)
        makers = makers_for(Quantization.NONE, capability)
        weights = load_weights(tensors, config, dtype, makers=makers, kept=kept)
    layout = kv_layout(config, _BLOCK_SIZE, dtype)
    num_all = spare_blocks(_NUM_BLOCKS, _BLOCK_SIZE).stop
    pool = torch.full((num_all, layout.block_bytes), 0xFF, dtype=torch.uint8, device=device.torch)
    limits = StepLimits(max_num_seqs=5, max_num_batched_tokens=256, max_model_len=256)
    return GpuRunner(config, weights, pool, layout, device, limits)


def on_cpu(directory: Path, ways: Ways, dtype: torch.dtype) -> TorchRunner:
    """Makes a runner with the numbers that the codes mean."""
    config = parse_model_config(open_model(directory).config())
    with open_tensors(directory, config, torch.device("cpu")) as source:
        weights = load_weights(CodedTensors(source, ways), config, dtype)
    return TorchRunner(config, weights, _NUM_BLOCKS, _BLOCK_SIZE, fused=False)


def weights_of(runner: GpuRunner) -> DecoderWeights:
    weights = getattr(runner._model, "_weights")  # noqa: B009 -- the seam `Model` does not show them
    assert isinstance(weights, DecoderWeights)
    return weights


def logprobs_of(rows: list[Row]) -> list[float]:
    return [sampled for row in rows for sampled, _, _ in row.logprobs]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", WAYS)
def test_tokens_and_logprobs_are_those_of_the_numbers(name: str, tmp_path: Path) -> None:
    family, shape, ways = WAYS[name]
    directory = write_checkpoint(tmp_path / "model", family, **shape)
    prompts, kept = prompts_of([2, 67]), KeptForms()

    rows = run_greedy(on_gpu(directory, ways, torch.float32, kept=kept), prompts, 2, chunk=66, num_logprobs=0)

    expected = run_greedy(on_cpu(directory, ways, torch.float32), prompts, 2, chunk=66, num_logprobs=0)
    assert [row.generated for row in rows] == [row.generated for row in expected]
    assert logprobs_of(rows) == pytest.approx(logprobs_of(expected), abs=1e-4)
    assert kept.notices() == ()


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "ways",
    [
        {"": (Code.UINT4, 32, _AS_THEY_ARE)},
        {"": (Code.INT8, 1000, Inputs.INT8)},
        {"": (Code.E4M3, 32, Inputs.E4M3_GROUPS)},
        {"": (Code.E4M3, 1000, Inputs.E4M3)},
    ],
    ids=["uint4", "int8 x int8", "e4m3 x e4m3 by groups", "e4m3 x e4m3"],
)
def test_narrow_dtypes_and_inputs_stay_near_the_numbers(ways: Ways, dtype: torch.dtype, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", "llama", dtype=dtype, tie_word_embeddings=False)
    prompts = prompts_of([5, 20, 37])

    rows = run_greedy(on_gpu(directory, ways, dtype), prompts, 1, chunk=40, num_logprobs=0)

    expected = run_greedy(on_cpu(directory, ways, torch.float32), prompts, 1, chunk=40, num_logprobs=0)
    assert logprobs_of(rows) == pytest.approx(logprobs_of(expected), abs=0.2)


def test_experts_are_one_kernel_of_codes(tmp_path: Path) -> None:
    family, shape, ways = WAYS["qwen3-moe"]
    runner = on_gpu(write_checkpoint(tmp_path / "model", family, **shape, num_hidden_layers=1), ways, torch.float32)

    (layer,) = weights_of(runner).layers
    assert isinstance(layer.mlp, ExpertsMlp)
    assert isinstance(layer.mlp.experts.kernel, CodedExperts)


def test_gpt_oss_has_the_logprobs_of_transformers_over_the_same_file(tmp_path: Path) -> None:
    """In MXFP4, which `transformers` unpacks itself. Experts of 160 columns; a row uses two of five."""
    directory, kept = tmp_path / "quantized", KeptForms()
    shape: dict[str, Any] = {
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_local_experts": 5,
        "num_hidden_layers": 1,
    }
    write_mxfp4(directory, write_checkpoint(tmp_path / "plain", "gpt_oss", **shape))
    runner = on_gpu(directory, None, torch.float32, kept=kept)

    rows = run_greedy(runner, prompts_of([1, 19]), 2, chunk=16, num_logprobs=0)

    reference = Reference(directory, quantization_config=Mxfp4Config(dequantize=True))
    for row, prompt in zip(rows, prompts_of([1, 19]), strict=True):
        tokens, logprobs = reference.run(prompt, 2)
        assert row.generated == tokens
        assert logprobs_of([row]) == pytest.approx(logprobs[torch.arange(2), tokens].tolist(), abs=1e-4)
    assert kept.notices() == ()
    for layer in weights_of(runner).layers:
        assert isinstance(layer.mlp, ExpertsMlp)
        assert isinstance(layer.mlp.experts.kernel, CodedExperts)


def with_rounded_inputs(reference: Reference, group: int | None) -> Reference:
    """Rounds what linear layers within the layers get to e4m3, with a scale for each row or group, as DeepSeek-V3
    (arXiv 2412.19437, 3.3.2) and compressed-tensors define it, in float32.
    """

    def round_inputs(_: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        (x,) = inputs
        groups = x.unflatten(-1, (-1, group or x.shape[-1]))
        scales = groups.abs().amax(dim=-1, keepdim=True) / 448
        return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2)

    for name, layer in reference._model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            layer.register_forward_pre_hook(round_inputs)
    return reference


@pytest.mark.few(1)
@pytest.mark.parametrize(("way", "group"), [("fp8-blocks", 128), ("w8a8-float", None), ("fp8-static", None)])
def test_checkpoints_in_fp8_have_their_inputs_rounded(way: str, group: int | None, tmp_path: Path) -> None:
    """Near what the format's definition gives; here and there the last bits of a number decide its code, which moves
    all that follows, but never as far as rounding itself does. Older GPUs take inputs as they are.
    """
    shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 32}
    write_quantized(tmp_path / "quantized", write_checkpoint(tmp_path / "plain", **shape), WAYS_OF_FILES[way])
    prompts, kept = prompts_of([5, 18]), KeptForms()
    numbers = tmp_path / "quantized" / "numbers"
    found, plainly = (
        run_greedy(on_gpu(tmp_path / "quantized", None, torch.float32, gpu, kept), prompts, 1, 20, num_logprobs=19)
        for gpu in (_HOPPER, _AMPERE)
    )
    assert kept.notices() == ()
    rounding, exact = with_rounded_inputs(Reference(numbers), group), Reference(numbers)
    for row, plain, prompt in zip(found, plainly, prompts, strict=True):
        (_, rounded), (_, expected) = rounding.run(prompt, 1), exact.run(prompt, 1)
        ((_, ids, values),), ((_, other_ids, others),) = row.logprobs, plain.logprobs
        effect = float((rounded - expected).abs().mean())
        assert float((torch.tensor(values) - rounded[0, list(ids)]).abs().mean()) < 0.2 * effect
        assert others == pytest.approx(expected[0, list(other_ids)].tolist(), abs=1e-3)


@pytest.mark.parametrize(
    ("inputs", "capability", "kept"),
    [(_AS_THEY_ARE, _AMPERE, True), (Inputs.E4M3, _AMPERE, True), (_AS_THEY_ARE, _TURING, False)],
)
def test_what_a_gpu_cannot_multiply_is_unpacked_and_told(
    inputs: Inputs, capability: tuple[int, int], kept: bool, tmp_path: Path
) -> None:
    directory, forms = write_checkpoint(tmp_path / "model", num_hidden_layers=1), KeptForms()

    on_gpu(directory, {"_proj": (Code.E4M3, 1000, inputs)}, torch.float32, capability, forms)

    told = "7 matrices stored as e4m3 with a scale for each row are unpacked: no kernel here multiplies them so"
    assert forms.notices() == (() if kept else (told,))
