"""Models whose weights stay in the codes of their file: what is kept, and that they answer as `transformers`."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from services.engine.kernels.cpu.coded_linear import CodedLinear
from services.engine.models.architectures import parse_model_config
from services.engine.models.parts import GatedMlp, GroupedAttention
from services.engine.models.registry import load_weights, open_tensors
from services.engine.models.weights import DecoderWeights
from services.engine.quantization.kept import KeptForms
from services.engine.runner.load import load_runner
from services.protocol.model_files.open import open_model
from tests.checkpoints import write_checkpoint
from tests.engine.models.test_gguf import WIDE, engine, reference_of
from tests.engine.wide_logprobs import assert_right_beside_narrow_ones
from tests.gguf_files import write_gguf

KINDS = ("Q4_1", "Q8_0", "Q4_0", "Q4_K", "Q6_K")


def loaded(path: Path, dtype: torch.dtype) -> tuple[DecoderWeights, KeptForms, int]:
    """Weights, what was kept, and the bytes that were read."""
    config, kept, read = parse_model_config(open_model(path).config()), KeptForms(), list[int]()
    with open_tensors(path, config, torch.device("cpu")) as source:
        weights = load_weights(source, config, dtype, fused=True, kept=kept, on_read=read.append)
    assert isinstance(weights, DecoderWeights)
    return weights, kept, sum(read)


def written(directory: Path, kind: str, *, tied: bool = True) -> Path:
    checkpoint = write_checkpoint(directory / "checkpoint", **WIDE, tie_word_embeddings=tied)
    return write_gguf(directory / "model.gguf", checkpoint, GGMLQuantizationType[kind])


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_all_matrices_stay_in_codes(kind: str, tied: bool, tmp_path: Path) -> None:
    """Once each: a tied output layer multiplies the embedding's panels."""
    path = written(tmp_path, kind, tied=tied)
    weights, kept, num_bytes = loaded(path, torch.bfloat16)
    layer = weights.layers[0]
    assert weights.lm_head is not None
    assert weights.embedding is not None
    assert isinstance(layer.attention, GroupedAttention)
    assert isinstance(layer.mlp, GatedMlp)
    linears = [layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down, weights.lm_head]
    assert all(isinstance(linear._kernel, CodedLinear) for linear in linears)
    assert kept.notices() == ()
    assert num_bytes < 1.1 * path.stat().st_size  # of Q4_0, an offset for each scale is counted, but not kept
    panels = weights.embedding.panels
    assert panels is not None
    assert weights.embedding.table is None
    assert isinstance(weights.lm_head._kernel, CodedLinear)
    assert (weights.lm_head._kernel._parts[0].panels.memory is panels.memory) == tied


def test_logprobs_of_a_file_of_two_kinds_are_those_of_transformers(tmp_path: Path) -> None:
    """As Q4_K_M: V and down have more bits, and so has the embedding, which is the output layer too."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", **WIDE, tie_word_embeddings=True)
    others = dict.fromkeys(("attn_v", "ffn_down", "token_embd"), GGMLQuantizationType.Q6_K)
    path = write_gguf(tmp_path / "model.gguf", checkpoint, GGMLQuantizationType.Q4_K, others=others)
    assert loaded(path, torch.float32)[1].notices() == ()
    assert_right_beside_narrow_ones(load_runner(engine(path)).runner, reference_of(path), depth=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_in_float32_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Of the numbers that it makes of the same file."""
    path = written(tmp_path, kind)
    assert_right_beside_narrow_ones(load_runner(engine(path)).runner, reference_of(path), depth=0)
