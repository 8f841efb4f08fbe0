"""Quantized checkpoints: the numbers of each way of storing, their parts, their codes, and what is refused."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from services.config import Kernels
from services.config.engine import EngineConfig
from services.engine.models.architectures import parse_model_config, shapes_of
from services.engine.models.registry import open_tensors
from services.engine.models.tensor_source import TensorSource
from services.engine.quantization.codes import Inputs
from services.engine.runner.cpu.torch_runner import TorchRunner
from services.engine.runner.load import load_runner
from services.protocol.model_files.base import ModelError
from services.protocol.model_files.open import open_model
from tests.checkpoints import edit_json, save_tensors, write_checkpoint
from tests.engine.models.test_shares import parts
from tests.engine.oracle import Reference, prompts_of
from tests.engine.stepping import run_greedy
from tests.quantized_checkpoints import (
    WAYS,
    Way,
    awq,
    compressed_ints,
    float8,
    gptq,
    is_quantized,
    write_mxfp4,
    write_quantized,
)

CPU = torch.device("cpu")
LAYER = "model.layers.0."
MATRICES = [f"{LAYER}{name}.weight" for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")]
NUM_TOKENS = 12
INPUTS = {
    "w8a8": Inputs.INT8,
    "w8a8-static": Inputs.INT8,
    "w8a8-asymmetric": Inputs.INT8,
    "w8a8-float": Inputs.E4M3,
    "fp8-rows": Inputs.E4M3,
    "fp8-static": Inputs.E4M3,
    "fp8-blocks": Inputs.E4M3_GROUPS,
    "fp8-small-blocks": Inputs.E4M3_GROUPS,
}
Written = Callable[[str], tuple[Path, dict[str, Tensor]]]


def opened(path: Path) -> TensorSource:
    return ExitStack().enter_context(open_tensors(path, parse_model_config(open_model(path).config()), CPU))


def check_all(path: Path) -> None:
    config = parse_model_config(open_model(path).config())
    with open_tensors(path, config, CPU) as source:
        for name, shape in shapes_of(config).items():
            source.check(name, shape)
        assert source.names == shapes_of(config).keys()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def written(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, dict[str, Tensor]]]:
    made: dict[str, tuple[Path, dict[str, Tensor]]] = {}

    def of(way: str) -> tuple[Path, dict[str, Tensor]]:
        if way not in made:
            directory = tmp_path_factory.mktemp(way)
            made[way] = directory, write_quantized(directory, checkpoint, WAYS[way])
        return made[way]

    return of


@pytest.mark.few(8)
@pytest.mark.parametrize("way", WAYS)
def test_numbers_are_those_that_the_format_means(way: str, written: Written) -> None:
    """To the bit, as float64 rounds them, and so are those of codes; only groups that are cut have none."""
    directory, meant = written(way)
    check_all(directory)
    source = opened(directory)
    for name, expected in meant.items():
        assert torch.equal(source.read(name, torch.float32), expected), name
        assert torch.equal(source.read(name, torch.bfloat16), expected.to(torch.bfloat16)), name
        matrix = source.coded(name)
        assert (matrix is not None) == is_quantized(name)
        if matrix is not None:
            assert torch.equal(matrix.numbers(torch.float32), expected)
            assert matrix.inputs is INPUTS.get(way, Inputs.AS_THEY_ARE)


@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_part_is_that_of_the_whole(data: st.DataObject, way: str, written: Written) -> None:
    """A rank's share, wherever it cuts a word or a group; a cut group has no codes."""
    directory, meant = written(way)
    name = data.draw(st.sampled_from(MATRICES))
    whole = meant[name]
    rows, columns = (data.draw(parts(size)) for size in whole.shape)
    expected = whole[rows or slice(None)][:, columns or slice(None)]
    source = opened(directory)
    assert torch.equal(source.read(name, torch.float32, rows, columns), expected)
    if (matrix := source.coded(name, rows, columns)) is not None:
        assert torch.equal(matrix.numbers(torch.float32), expected)


@pytest.mark.few(4)
@pytest.mark.parametrize("way", WAYS)
def test_columns_that_begin_with_a_group_have_its_scales(way: str, written: Written) -> None:
    directory, meant = written(way)
    source, name = opened(directory), MATRICES[0]
    whole = meant[name]
    found = {begin: source.coded(name, None, slice(begin, whole.shape[1])) for begin in range(1, whole.shape[1])}
    coded = {begin: matrix for begin, matrix in found.items() if matrix is not None}
    for begin, matrix in coded.items():
        assert torch.equal(matrix.numbers(torch.float32), whole[:, begin:])
    assert coded or "ordered" in way


@pytest.mark.few(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_loaded_model_has_the_logprobs_of_transformers_over_these_numbers(way: str, written: Written) -> None:
    """Kernels of int8 round the inputs, too: `test_int8_model.py` has those."""
    assert_logprobs(written(way)[0], Kernels.TORCH if way.startswith("w8a8") else Kernels.AUTO)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "phi3", "gpt_oss"])
def test_experts_latents_and_fused_layers_too(family: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "plain", family)
    if family == "gpt_oss":
        write_mxfp4(tmp_path / "quantized", checkpoint)
    else:
        way = (
            float8("block", config=WAYS["fp8-blocks"].config)
            if family == "deepseek_v3"
            else compressed_ints(4, "group", 8)
        )
        write_quantized(tmp_path / "quantized", checkpoint, way)
    assert_logprobs(tmp_path / "quantized")


def assert_logprobs(directory: Path, kernels: Kernels = Kernels.AUTO) -> None:
    """Of greedy tokens of three prompts, each until a near tie."""
    options: dict[str, Any] = {"dtype": "float32", "kv_memory_bytes": 16 << 20, "num_threads": 1, "kernels": kernels}
    runner, prompts = load_runner(EngineConfig(model=directory, **options)).runner, prompts_of([3, 17, 60])
    assert isinstance(runner, TorchRunner)
    reference, compared = Reference(directory / "numbers"), 0
    for row, prompt in zip(run_greedy(runner, prompts, NUM_TOKENS, 32, num_logprobs=0), prompts, strict=True):
        tokens, logprobs = reference.run(prompt, NUM_TOKENS)
        best = logprobs.topk(2).values
        ties = torch.nonzero(best[:, 0] - best[:, 1] < 1e-3)
        clear = int(ties[0]) if len(ties) else NUM_TOKENS
        assert row.generated[:clear] == tokens[:clear]
        found = torch.tensor([logprob for logprob, _, _ in row.logprobs[:clear]])
        assert torch.allclose(found, logprobs[torch.arange(clear), tokens[:clear]], atol=1e-3)
        compared += clear
    assert compared > NUM_TOKENS


def test_mxfp4_is_what_transformers_unpacks(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "plain", "gpt_oss")
    meant = write_mxfp4(tmp_path / "quantized", checkpoint)
    check_all(tmp_path / "quantized")
    source, stored = opened(tmp_path / "quantized"), load_file(tmp_path / "quantized" / "model.safetensors")
    for end in ("gate_up_proj", "down_proj"):
        name = f"{LAYER}mlp.experts.{end}"
        parts_of = (stored[f"{name}{part}"] for part in ("_blocks", "_scales"))
        expected = convert_moe_packed_tensors(*parts_of, dtype=torch.float32)
        assert torch.equal(expected, meant[name])
        assert torch.equal(source.read(name, torch.float32), expected)
        assert torch.equal(source.read(name, torch.float32, slice(2, 5), slice(7, 40)), expected[2:5, 7:40])
        assert source.coded(name) is None
        for first, last, group in ((0, 64, 32), (32, 64, 32), (16, 48, 16), (24, 40, 8), (7, 33, 1), (32, 33, 1)):
            matrix = source.coded(name, slice(3, 4), slice(first, last))
            assert matrix is not None
            assert matrix.group == group
            assert torch.equal(matrix.numbers(torch.float32), expected[3, first:last].T)
        assert source.coded(name, slice(3, 4), slice(5, 5)) is None


@pytest.mark.few(2)
@pytest.mark.parametrize("way", [way for way in WAYS if way.startswith("w") and "ordered" not in way])
def test_what_compressed_tensors_means_is_what_its_library_unpacks(way: str) -> None:
    """Of the checkpoints that these tests write. It has given up `actorder: group`."""
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    stored, meant = WAYS[way].store(weight)
    group = WAYS[way].config["config_groups"]["group_0"]
    scheme = QuantizationScheme.model_validate({key: value for key, value in group.items() if value is not None})
    compressor = BaseCompressor.get_value_from_registry(WAYS[way].config["format"])
    wide = {end[1:]: part.to(torch.float32) if end == ".weight_scale" else part for end, part in stored.items()}
    found = compressor.decompress(wide, scheme)["weight"]
    assert torch.allclose(found, torch.from_numpy(meant).to(torch.float32), rtol=1e-6, atol=0)


def change(directory: Path, name: str, tensor: Callable[[Tensor], Tensor | None]) -> None:
    """Changes one tensor of a file; None: it is left out."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    changed = tensor(tensors.pop(name))
    save_tensors(path, tensors if changed is None else tensors | {name: changed})


def planted(row: int, value: float) -> Callable[[Tensor], Tensor]:
    def put(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[row] = value
        return tensor

    return put


def test_mxfp4_has_every_exponent_but_the_one_that_means_no_number(tmp_path: Path) -> None:
    """The lowest is 2 ** -127, which bfloat16 and float32 have as a number without an exponent of its own."""
    directory, name = tmp_path / "quantized", f"{LAYER}mlp.experts.down_proj"
    write_mxfp4(directory, write_checkpoint(tmp_path / "plain", "gpt_oss"))
    change(directory, f"{name}_scales", lambda scales: (torch.arange(scales.numel()) % 255).view_as(scales).byte())
    stored = load_file(directory / "model.safetensors")
    expected = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32)
    assert torch.equal(opened(directory).read(name, torch.float32), expected)
    change(directory, f"{name}_scales", planted(7, 255))
    with pytest.raises(ModelError, match="down_proj_scales has a scale that is not finite"):
        check_all(directory)


GATE = f"{LAYER}mlp.gate_proj"
DAMAGES: dict[str, tuple[str, str, Callable[[Tensor], Tensor | None], str]] = {
    "no scales": ("awq", ".scales", lambda _: None, "gate_proj.scales is missing"),
    "no zero points": ("awq", ".qzeros", lambda _: None, "gate_proj.qzeros is missing"),
    "no order": ("gptq-4-ordered", ".g_idx", lambda _: None, "gate_proj.g_idx is missing"),
    "no codes": ("gptq-4", ".qweight", lambda _: None, "gate_proj.weight is missing"),
    "cut codes": ("gptq-4", ".qweight", lambda codes: codes[:-1], r"qweight has shape \[7, 96\], .* \[8, 96\]"),
    "cut scales": ("w4a16", ".weight_scale", lambda scales: scales[:, :-1], r"weight_scale has shape \[96, 1\]"),
    "codes of another dtype": ("awq", ".qweight", lambda codes: codes.to(torch.int64), "stored as I64, I32 was"),
    "scales of another dtype": ("w8a16", ".weight_scale", lambda scales: scales.to(torch.float64), "stored as F64"),
    "a scale of NaN": ("gptq-8", ".scales", planted(3, float("nan")), "scales has a scale that is not finite"),
    "an infinite scale": ("fp8-blocks", ".weight_scale_inv", planted(0, float("inf")), "not finite"),
    "no FP8 scales": ("fp8-rows", ".weight_scale", lambda _: None, "has 0 tensors of scales"),
    "groups that are not there": ("gptq-4-ordered", ".g_idx", planted(5, 9), "g_idx names a group that is not there"),
    "an order that is none": ("gptq-4", ".g_idx", planted(5, 1), "contradicts desc_act, which is false"),
    "zero points of symmetric numbers": ("gptq-4", ".qzeros", planted(0, 5), "contradict sym, which is true"),
    "no shape": ("w4a16", ".weight_shape", lambda _: None, "gate_proj.weight_shape is missing"),
    "another shape": ("w4a16", ".weight_shape", planted(0, 95), r"weight_shape is \[95, 64\]"),
    "numbers where packed codes are": ("w4a16", ".weight_packed", lambda codes: codes.to(torch.int8), "stored as I8"),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tensors_are_refused_by_name_before_any_weight_is_read(
    damage: str, checkpoint: Path, tmp_path: Path
) -> None:
    way, end, changed, words = DAMAGES[damage]
    write_quantized(tmp_path, checkpoint, WAYS[way])
    change(tmp_path, f"{GATE}{end}", changed)
    with pytest.raises(ModelError, match=words):
        check_all(tmp_path)


SETTINGS: dict[str, tuple[Way, dict[str, Any], str]] = {
    "bits": (awq(32), {"bits": 8}, "quantization_config: bits 8 is not supported"),
    "other bits than tensors": (gptq(8, 32), {"bits": 4}, "qweight has shape"),
    "three bits": (gptq(4, 32), {"bits": 3}, "bits 3 is not supported"),
    "a group that does not divide": (awq(32), {"group_size": 40}, "64 inputs are no multiple of the group, 40"),
    "another group": (gptq(4, 32), {"group_size": 16}, r"qzeros has shape \[2, 8\], .* \[4, 8\]"),
    "gemv": (awq(32), {"version": "gemv"}, "version 'gemv' is not supported"),
    "no zero points": (awq(32), {"zero_point": False}, "zero_point False is not supported"),
    "marlin": (gptq(4, 32), {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
    "dynamic": (gptq(4, 32), {"dynamic": {"-:lm_head": {}}}, "dynamic .* is not supported"),
    "unknown": (gptq(4, 32), {"rotation": "hadamard"}, "rotation 'hadamard' is not supported"),
    "second version": (gptq(4, 32), {"checkpoint_format": "gptq_v2"}, "contradict sym"),
    "excluded": (awq(32), {"modules_to_not_convert": ["down_proj"]}, r"excludes model\.layers\.0\.mlp\.down_proj"),
    "not named": (gptq(4, 32), {"modules_in_block_to_quantize": [["mlp.up_proj"]]}, "or does not name it"),
    "no pattern": (awq(32), {"modules_to_not_convert": ["("]}, "is no regular expression"),
    "another method": (awq(32), {"quant_method": "gptq"}, "damp|tensor|zero_point True is not supported"),
    "e5m2": (WAYS["fp8-blocks"], {"fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
    "no blocks": (WAYS["fp8-blocks"], {"weight_block_size": [128]}, "is no list of two sizes"),
    "smaller blocks": (WAYS["fp8-blocks"], {"weight_block_size": [32, 32]}, r"weight_scale_inv has shape \[1, 1\]"),
    "ignored": (WAYS["w4a16"], {"ignore": ["re:.*down_proj"]}, r"excludes model\.layers\.0\.mlp\.down_proj"),
    "groups that do not divide": (compressed_ints(4, "group", 40), {}, "64 inputs are no multiple of the group, 40"),
    "another form": (WAYS["w4a16"], {"format": "int-quantized"}, "num_bits 4 is not supported"),
    "unpacked": (WAYS["w8a16"], {"format": "int-quantized"}, "weight_packed contradicts quantization_config"),
    "floats in integers": (WAYS["w8a8-float"], {"format": "pack-quantized"}, "type 'float' contradicts the format"),
    "nvfp4": (WAYS["w4a16"], {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' is not supported"),
    "no groups": (WAYS["w4a16"], {"config_groups": {}}, "config_groups {} says nothing of any layer"),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_contradict_the_tensors_or_are_not_supported_are_refused(
    case: str, checkpoint: Path, tmp_path: Path
) -> None:
    way, changes, words = SETTINGS[case]
    write_quantized(tmp_path, checkpoint, way)
    edit_json(tmp_path / "config.json", quantization_config=way.config | changes)
    with pytest.raises(ModelError, match=words):
        check_all(tmp_path)
