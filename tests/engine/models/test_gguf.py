"""GGUF files of both families and of each quantization: their tokens are those of `transformers`."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from services.config import LoadFormat
from services.config.engine import EngineConfig
from services.engine.models import gguf_tensors
from services.engine.models.architectures import parse_model_config
from services.engine.models.gguf_stored import QUANTIZED
from services.engine.models.registry import open_tensors, weight_files
from services.engine.models.weight_files import weights_id
from services.engine.runner.cpu.torch_runner import TorchRunner
from services.engine.runner.load import load_runner
from services.protocol.model_files.base import ModelError
from services.protocol.model_files.open import open_model
from tests.checkpoints import LLAMA3_ROPE, YARN_ROPE, save_tensors, write_checkpoint
from tests.engine.oracle import Reference, prompts_of
from tests.engine.stepping import run_greedy
from tests.gguf_files import write_gguf

NUM_TOKENS = 12
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    ),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN_ROPE}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}
# Wide enough for blocks of 256 numbers.
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
# fmt: off
BY_TRANSFORMERS = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
)
# fmt: on


def engine(path: Path, **options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"dtype": "float32", "kv_memory_bytes": 16 << 20, "num_threads": 1}
    return EngineConfig(model=path, **defaults | options)


def assert_answers_as(path: Path, reference: Reference) -> None:
    """Greedy tokens of three prompts, each as far as no near tie leaves the choice to rounding: most of them."""
    runner, prompts, num_compared = load_runner(engine(path)).runner, prompts_of([3, 17, 90]), 0
    assert isinstance(runner, TorchRunner)
    for row, prompt in zip(run_greedy(runner, prompts, NUM_TOKENS, chunk=32), prompts, strict=True):
        tokens, logprobs = reference.run(prompt, NUM_TOKENS)
        best = logprobs.topk(2).values
        ties = torch.nonzero(best[:, 0] - best[:, 1] < 1e-3)
        clear = int(ties[0]) if len(ties) else NUM_TOKENS
        assert row.generated[:clear] == tokens[:clear]
        num_compared += clear
    assert num_compared > NUM_TOKENS * len(prompts) / 2


def reference_of(path: Path) -> Reference:
    """The file as `transformers` reads it itself."""
    made = Reference.__new__(Reference)
    made._model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return made


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_answers_as_the_checkpoint_that_it_was_made_of(name: str, tmp_path: Path) -> None:
    family, options = FAMILIES[name]
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family, **options)
    path = write_gguf(tmp_path / "model.gguf", checkpoint)
    assert_answers_as(path, Reference(checkpoint))


def test_rotary_factors_are_llama_3s_scaling(tmp_path: Path) -> None:
    """llama.cpp writes what each frequency is divided by, where config.json has a formula."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", rope_parameters=LLAMA3_ROPE)
    reference = Reference(checkpoint)
    plain = 1.0 / 10000.0 ** (np.arange(0, 16, 2) / 16)
    factors = plain / reference._model.model.rotary_emb.inv_freq.numpy()
    assert factors.max() > 4
    path = write_gguf(tmp_path / "model.gguf", checkpoint, rotary_factors=factors.tolist())
    assert_answers_as(path, reference)


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", BY_TRANSFORMERS)
def test_each_quantization_is_read_as_transformers_reads_it(kind: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", **WIDE)
    path = write_gguf(tmp_path / "model.gguf", checkpoint, GGMLQuantizationType[kind])
    assert_answers_as(path, reference_of(path))


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1"])
def test_quantizations_that_transformers_cannot_read_are_near_what_was_quantized(kind: str, tmp_path: Path) -> None:
    """And their tokens are those of `transformers` over the same numbers."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", **WIDE)
    path = write_gguf(tmp_path / "model.gguf", checkpoint, GGMLQuantizationType[kind])
    values = load_file(checkpoint / "model.safetensors")
    near = {}
    with open_tensors(path, parse_model_config(open_model(path).config()), torch.device("cpu")) as source:
        for name, value in values.items():
            near[name] = source.read(name, torch.float32)
            step = np.abs(value).reshape(-1, 32).max(axis=1) / 12  # half of 2 / 31 of a block's range, and some
            error = np.abs(near[name].numpy() - value).reshape(-1, 32).max(axis=1)
            assert (error <= step).all(), name
    save_tensors(checkpoint / "model.safetensors", near)
    assert_answers_as(path, Reference(checkpoint))


def test_auto_is_bfloat16(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", write_checkpoint(tmp_path / "checkpoint"), GGMLQuantizationType.F16)
    assert load_runner(engine(path, dtype="auto")).runner.layout.dtype == "bfloat16"


def test_a_file_runs_with_random_weights_too(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", write_checkpoint(tmp_path / "checkpoint"))
    assert load_runner(engine(path, load_format=LoadFormat.DUMMY)).vocab_size == 320


def test_weights_id_tells_files_apart(tmp_path: Path) -> None:
    """Workers exchange KV only where it is the same."""
    first = write_gguf(tmp_path / "first.gguf", write_checkpoint(tmp_path / "a"))
    same = write_gguf(tmp_path / "same.gguf", tmp_path / "a")
    other = write_gguf(tmp_path / "other.gguf", write_checkpoint(tmp_path / "b", seed=1))
    config = parse_model_config(open_model(first).config())
    ids = [weights_id(weight_files(path), config) for path in (first, same, other)]
    assert ids[0] == ids[1] != ids[2]


def test_a_truncated_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", write_checkpoint(tmp_path / "checkpoint"))
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ModelError, match=r"model\.gguf is truncated: its tensors end at byte \d+, the file at \d+"):
        load_runner(engine(path))


@pytest.mark.parametrize("kind", ["TQ1_0", "MXFP4"])
def test_other_quantizations_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", **WIDE)
    path = write_gguf(tmp_path / "model.gguf", checkpoint, GGMLQuantizationType[kind])
    with pytest.raises(ModelError, match=rf"model\.gguf: tensor \S+ is stored as {kind}, which is not supported"):
        load_runner(engine(path))


def test_tensors_that_are_missing_left_over_or_there_twice_are_refused_by_name(tmp_path: Path) -> None:
    """By the file's own names."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    for more, words in (
        (
            {"blk.1.attn_sinks.weight": (4,)},
            "model.gguf: tensor blk.1.attn_sinks.weight is not part of LlamaForCausalLM",
        ),
        ({"model.norm.weight": (64,)}, "model.gguf: tensors .* are the same weight"),
    ):
        path = write_gguf(tmp_path / "model.gguf", checkpoint, more_tensors=more)
        with pytest.raises(ModelError, match=words):
            load_runner(engine(path))
    path = write_gguf(tmp_path / "model.gguf", checkpoint, left_out="blk.1.attn_output.weight")
    with pytest.raises(ModelError, match=r"tensor blk\.1\.attn_output\.weight is missing from model\.gguf"):
        load_runner(engine(path))


def test_what_is_wrong_with_values_names_the_file(tmp_path: Path) -> None:
    """There is no config.json."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    path = write_gguf(tmp_path / "model.gguf", checkpoint, change={"llama.attention.head_count_kv": 3})
    with pytest.raises(ModelError, match=r"^model\.gguf: num_key_value_heads 3 cannot be shared evenly by 4 attention"):
        load_runner(engine(path))


def test_the_readme_names_what_can_be_read() -> None:
    readme = (Path(gguf_tensors.__file__).parent / "README.md").read_text()
    (row,) = (line for line in readme.splitlines() if line.startswith("| stored as |"))
    assert set(row.removeprefix("| stored as |").strip(" |").split(", ")) == QUANTIZED | {"F32", "F16", "BF16"}
    assert {*BY_TRANSFORMERS[3:], "Q5_0", "Q5_1"} == QUANTIZED


def test_the_packages_names_are_known() -> None:
    """A version that renames a type would make files unreadable."""
    assert {GGMLQuantizationType[kind] for kind in BY_TRANSFORMERS} <= gguf.GGML_QUANT_SIZES.keys()
