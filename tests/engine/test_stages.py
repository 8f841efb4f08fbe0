"""Models whose layers are divided into stages: together these compute what `transformers` computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from services.engine.models.architectures import num_parameters
from services.engine.models.model_config import ModelConfig, layers_of_stages
from services.engine.models.registry import load_weights, open_tensors
from services.engine.models.tensor_source import WrappedTensors
from services.engine.runner import pieces
from services.protocol.model_files.base import ModelError
from tests.checkpoints import write_checkpoint
from tests.engine.models.test_gguf import WIDE, reference_of
from tests.engine.oracle import Reference, prompts_of
from tests.engine.stage_runners import config_of, stage_runners
from tests.engine.stepping import Row, run_greedy
from tests.engine.test_torch_runner import SHAPES
from tests.gguf_files import write_gguf
from tests.quantized_checkpoints import WAYS, write_quantized

NUM_TOKENS = 20
LENGTHS = [1, 37, 230]
SHARED = [name for name, (_, shape) in SHAPES.items() if shape.get("num_hidden_layers") != 1]
QUICK = ("llama-gqa2-tied", "qwen3-tied-bias-layers-slide-by-turns")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small steps have several, which end in the middle of rows."""
    monkeypatch.setattr(pieces, "LEAST", 32)


def assert_right(rows: list[Row], reference: Reference, within: float = 1e-4) -> None:
    """Tokens and log-probabilities are the reference's."""
    for row in rows:
        tokens, logprobs = reference.run(row.tokens[: row.num_prompt], NUM_TOKENS)
        assert row.generated == tokens
        for (sampled, _, top), token, expected in zip(row.logprobs, tokens, logprobs, strict=True):
            assert sampled == pytest.approx(float(expected[token]), abs=within)
            assert top == pytest.approx(expected.topk(4).values.tolist(), abs=within)


def generated(path: Path, num_stages: int, **options: Any) -> list[Row]:
    """Prompts in chunks of several pieces, then steps of one piece."""
    runners = stage_runners(path, num_stages, **options)
    return run_greedy(runners, prompts_of(LENGTHS), NUM_TOKENS, chunk=200, num_logprobs=4)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in SHARED]
)
def test_stages_compute_what_transformers_computes(name: str, tmp_path: Path) -> None:
    """Of as many layers as there are, in up to three stages."""
    family, shape = SHAPES[name]
    directory = write_checkpoint(tmp_path / "model", family, **shape)
    num_stages = min(3, config_of(directory).num_layers)
    assert num_stages > 1
    assert_right(generated(directory, num_stages), Reference(directory))


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "shape"),
    [("llama", {}), ("qwen3_moe", {}), ("gpt_oss", {"num_hidden_layers": 4}), ("deepseek_v2", {}), ("opt", {})],
)
def test_stages_without_kernels_do_too(family: str, shape: dict[str, Any], tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", family, **shape)
    assert_right(generated(directory, 2, fused=False), Reference(directory))


@pytest.mark.long
@pytest.mark.parametrize("way", ["w4a16", "fp8-blocks", "Q4_K", "Q6_K"])
def test_stages_multiply_codes(way: str, tmp_path: Path) -> None:
    """A stage reads those of its own layers."""
    checkpoint, path = tmp_path / "plain", tmp_path / "quantized"
    if way in GGMLQuantizationType.__members__:
        path = write_gguf(
            tmp_path / "model.gguf",
            write_checkpoint(checkpoint, **WIDE | {"num_hidden_layers": 3}),
            GGMLQuantizationType[way],
        )
    else:
        write_quantized(path, write_checkpoint(checkpoint), WAYS[way])
    reference = reference_of(path) if path.suffix == ".gguf" else Reference(path / "numbers")
    assert_right(generated(path, 2), reference, within=5e-4)


def test_layers_that_do_not_divide_evenly_are_on_earlier_stages() -> None:
    """The last one has the output layer beside its layers."""
    assert layers_of_stages(7, 3) == [range(5, 7), range(3, 5), range(0, 3)]
    assert layers_of_stages(8, 2) == [range(4, 8), range(0, 4)]
    with pytest.raises(ModelError, match="3 stages cannot share 2 layers"):
        layers_of_stages(2, 3)


def test_a_stage_reads_its_own_layers_and_ends_alone(tmp_path: Path) -> None:
    """The table of a tied model is at both ends, the norm behind the last layer everywhere."""
    directory = write_checkpoint(tmp_path / "model", num_hidden_layers=3, tie_word_embeddings=True)
    whole = config_of(directory)
    read = [names_read(directory, whole.shard(0, 1, layers)) for layers in layers_of_stages(3, 3)]
    outside = [{name for name in names if "layers" not in name} for names in read]
    table, norm = "model.embed_tokens.weight", "model.norm.weight"
    assert outside == [{table, norm}, {norm}, {table, norm}]
    for layer, names in zip((2, 1, 0), read, strict=True):
        of_layers = {name for name in names if "layers" in name}
        assert of_layers
        assert all(name.startswith(f"model.layers.{layer}.") for name in of_layers)
    assert num_parameters(whole.shard(0, 1, range(1, 2))) < num_parameters(whole) / 3


def names_read(path: Path, config: ModelConfig) -> set[str]:
    """The stored names of the tensors that are read for this part of a model."""
    read: set[str] = set()

    class Noted(WrappedTensors):
        def read(
            self, name: str, dtype: torch.dtype, rows: slice | None = None, columns: slice | None = None
        ) -> Tensor:
            read.add(name)
            return super().read(name, dtype, rows, columns)

    with open_tensors(path, config, torch.device("cpu")) as tensors:
        load_weights(Noted(tensors), config, torch.float32)
    return read
