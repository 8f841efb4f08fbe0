"""gpt-oss with experts in MXFP4: what is kept of a checkpoint, and that it answers as `transformers`, which unpacks the
same file itself.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import Mxfp4Config

from services.config import Dtype, Quantization
from services.config.engine import EngineConfig
from services.engine.kernels.cpu.coded_experts import CodedExperts
from services.engine.kernels.cpu.int8_experts import Int8Experts
from services.engine.models.architectures import parse_model_config
from services.engine.models.experts import ExpertsMlp
from services.engine.models.model_config import ModelConfig
from services.engine.models.quantized.at_load import QuantizedAtLoad
from services.engine.models.registry import load_weights, open_tensors
from services.engine.models.tensor_source import TensorSource, WrappedTensors
from services.engine.models.weights import DecoderWeights
from services.engine.quantization.codes import CodedMatrix
from services.engine.quantization.kept import KeptForms
from services.engine.quantization.rounding import to_int4, to_int8
from services.engine.runner.load import load_runner
from services.protocol.model_files.open import open_model
from tests.checkpoints import write_checkpoint
from tests.engine.oracle import Reference, prompts_of
from tests.engine.stepping import run_greedy
from tests.quantized_checkpoints import write_mxfp4

CPU = torch.device("cpu")
NUM_TOKENS, WIDTH = 10, 160  # experts of five panels, which no tile of several divides
ROUND = {Quantization.INT4: to_int4, Quantization.INT8: to_int8}
OF_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mxfp4")
    plain = write_checkpoint(path / "plain", "gpt_oss", hidden_size=96, intermediate_size=WIDTH, sliding_window=20)
    write_mxfp4(path / "quantized", plain)
    return path / "quantized"


class Watched(WrappedTensors):
    """A `TensorSource` that tells which experts were read as numbers, and the most matrices of codes at one time."""

    def __init__(self, source: TensorSource) -> None:
        super().__init__(source)
        self._codes: list[StorageWeakRef] = []
        self.as_numbers: set[str] = set()
        self.most = 0
        self.num_coded = 0

    def read(self, name: str, dtype: torch.dtype, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        if name.endswith(OF_EXPERTS):
            self.as_numbers.add(name)
        return super().read(name, dtype, rows, columns)

    def coded(self, name: str, rows: slice | None = None, columns: slice | None = None) -> CodedMatrix | None:
        matrix = super().coded(name, rows, columns)
        if matrix is not None and name.endswith(OF_EXPERTS):
            alive = [one for one in self._codes if not one.expired()]
            self._codes = [*alive, StorageWeakRef(matrix.codes.untyped_storage())]
            self.most = max(self.most, len(self._codes))
            self.num_coded += 1
        return matrix


def experts_of(weights: object) -> Iterator[ExpertsMlp]:
    assert isinstance(weights, DecoderWeights)
    for layer in weights.layers:
        assert isinstance(layer.mlp, ExpertsMlp)
        yield layer.mlp


def config_of(directory: Path) -> ModelConfig:
    return parse_model_config(open_model(directory).config())


def test_logprobs_are_those_of_transformers_over_the_same_file(directory: Path) -> None:
    """Prompts of one token, which takes two of nine experts, and of many: greedy answers and their logprobs."""
    reference = Reference(directory, quantization_config=Mxfp4Config(dequantize=True))
    loaded = load_runner(EngineConfig(model=directory, dtype=Dtype.FLOAT32, kv_memory_bytes=16 << 20, num_threads=1))
    assert loaded.notices == ()
    prompts = prompts_of([1, 23, 90])
    for row, prompt in zip(run_greedy(loaded.runner, prompts, NUM_TOKENS, 40, num_logprobs=20), prompts, strict=True):
        tokens, logprobs = reference.run(prompt, NUM_TOKENS)
        assert row.generated == tokens
        for (sampled, ids, values), token, expected in zip(row.logprobs, tokens, logprobs, strict=True):
            assert sampled == pytest.approx(float(expected[token]), abs=1e-3)
            assert values == pytest.approx(expected[list(ids)].tolist(), abs=1e-3)


@pytest.mark.parametrize("quantization", [Quantization.NONE, *ROUND])
def test_experts_are_kept_in_codes_and_are_never_there_in_numbers(quantization: Quantization, directory: Path) -> None:
    """Stored in codes, or made codes at load: one is unpacked to a byte for each code, packed, and let go before the
    next.
    """
    path = directory if quantization is Quantization.NONE else directory / "numbers"
    config, kept, sizes = config_of(path), KeptForms(), list[int]()
    with open_tensors(path, config, CPU) as source:
        watched = Watched(QuantizedAtLoad(source, ROUND[quantization]) if quantization in ROUND else source)
        weights = load_weights(watched, config, torch.float32, fused=True, kept=kept, on_read=sizes.append)
    kind = Int8Experts if quantization is Quantization.INT8 else CodedExperts
    assert all(isinstance(mlp.experts.kernel, kind) for mlp in experts_of(weights))
    assert kept.notices() == ()
    assert watched.as_numbers == set()
    assert watched.num_coded == 2 * 2 * 9  # layers, products, experts
    assert watched.most == 4  # both products' of the first expert, which others are compared with, and of another


def test_ranks_that_cut_blocks_have_codes_too(directory: Path) -> None:
    """Ranks have 80 of the 160 columns, or 40, which cut blocks of 32."""
    whole, kept = config_of(directory), KeptForms()
    for rank, size in ((1, 2), (0, 4), (3, 4)):
        config = whole.shard(rank, size)
        with open_tensors(directory, config, CPU) as source:
            weights = load_weights(source, config, torch.float32, fused=True, kept=kept)
        assert all(isinstance(mlp.experts.kernel, CodedExperts) for mlp in experts_of(weights))
    assert kept.notices() == ()
