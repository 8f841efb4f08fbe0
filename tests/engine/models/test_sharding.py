"""A model shared out among ranks: their configurations, and weights that are exactly the whole model's."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.engine.models.architectures import num_parameters, parse_model_config, shapes_of
from services.engine.models.config import DecoderConfig
from services.engine.models.dummy import DummyTensors, dummy_id
from services.engine.models.embedding import Embedding
from services.engine.models.grouped_mlp import GroupedMlp
from services.engine.models.kv_scales import read_kv_scales
from services.engine.models.linear import Linear
from services.engine.models.model_config import ModelConfig
from services.engine.models.registry import load_weights, open_tensors, weight_files
from services.engine.models.tensor_source import TensorSource
from services.engine.models.weight_files import weights_id
from services.protocol.model_files.base import ModelError
from services.protocol.model_files.open import open_model
from tests.checkpoints import save_tensors, write_checkpoint
from tests.gguf_files import write_gguf

CPU = torch.device("cpu")
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mqa-tied-biases": (
        "llama",
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("mistral", {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", {}),
    "qwen2-uneven": ("qwen2", {"intermediate_size": 50}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "gemma2-tied-biases": ("gemma2", {"tie_word_embeddings": True, "attention_bias": True}),
    "gemma3-mqa": ("gemma3", {"num_key_value_heads": 1}),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss-uneven": ("gpt_oss", {"intermediate_size": 50}),
    "mixtral": ("mixtral", {"num_local_experts": 3}),
    "qwen2-moe-dense-first": ("qwen2_moe", {"mlp_only_layers": [0]}),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "phi3-fused": ("phi3", {"tie_word_embeddings": True}),
    "opt": ("opt", {"tie_word_embeddings": True}),
    "opt-norm-after-projected": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-no-bias": ("opt", {"enable_bias": False}),
}
IN_GGUF = ("llama", "llama-mqa-tied-biases", "qwen2", "qwen3-biases")
SUMMED = ("output", "down")  # each rank has some of the inputs
STACKED = ("qkv", "gate_up", "up")  # each rank has some of the outputs
OF_TOKENS = ("embedding", "lm_head")  # each rank has some rows
Held = tuple[Tensor, Tensor | None]  # a linear layer's weight and bias


def held(layer: Linear) -> Held:
    values = layer._multiply.keywords  # type: ignore[attr-defined]  # a partial, in float32 without kernels
    return values["weight"], values["bias"]


def by_place(weights: object, place: str = "") -> Iterator[tuple[str, Held]]:
    """All tensors of a model's weights with their biases, by the names of fields that lead to them."""
    if isinstance(weights, Linear):
        yield place, held(weights)
    elif isinstance(weights, GroupedMlp):
        for expert, products in enumerate(zip(weights._gate_ups, weights._downs, strict=True)):
            for name, product in zip(("gate_up", "down"), products, strict=True):
                yield f"{place}.{expert}.{name}", held(product)
    elif isinstance(weights, Embedding):
        assert weights.table is not None
        yield place, (weights.table, None)
    elif isinstance(weights, Tensor):
        yield place, (weights, None)
    elif isinstance(weights, tuple):
        for index, one in enumerate(weights):
            yield from by_place(one, f"{place}.{index}")
    elif is_dataclass(weights):
        for field in fields(weights):
            yield from by_place(getattr(weights, field.name), f"{place}.{field.name}")


def load(source: TensorSource, config: ModelConfig) -> dict[str, Held]:
    read: list[int] = []
    weights = load_weights(source, config, torch.float32, on_read=read.append)
    assert sum(read) == 4 * num_parameters(config)
    return dict(by_place(weights))


def rows_of(place: str, config: ModelConfig, rows: int) -> list[int]:
    """The rows of each of the matrices that are one below the other, of so many in all."""
    if place == "qkv":
        return [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    return [rows // 2] * 2 if place == "gate_up" else [rows]


def assert_shared_out(source: TensorSource, config: ModelConfig, size: int) -> None:
    whole, ranks = load(source, config), [load(source, config.shard(rank, size)) for rank in range(size)]
    seen = set()
    for place, (weight, bias) in whole.items():
        name, theirs = place.rpartition(".")[2], [rank[place] for rank in ranks]
        seen.add(name)
        if name in SUMMED:
            assert torch.equal(torch.cat([part for part, _ in theirs], dim=1), weight), place
            assert all(other is None for _, other in theirs[1:]), "a bias is added once"
            assert_equal(theirs[0][1], bias)
        elif name in STACKED:
            assert_stacked(name, [part for part, _ in theirs], weight, config)
            if bias is None:
                assert all(part is None for _, part in theirs)
            else:
                assert_stacked(name, [part for _, part in theirs if part is not None], bias, config)
        elif name == "qk_norm":  # the same weight for every head of Q, and another for every head of K
            for rank, (part, _) in enumerate(theirs):
                own = config.shard(rank, size)
                each = torch.tensor([0] * own.num_heads + [config.num_heads] * own.num_kv_heads)
                assert torch.equal(part, weight[each]), place
        elif name in OF_TOKENS:
            assert torch.equal(torch.cat([part for part, _ in theirs]), weight)
            assert max(len(part) for part, _ in theirs) - min(len(part) for part, _ in theirs) <= 1
        elif name == "sinks":  # of each head
            assert torch.equal(torch.cat([part for part, _ in theirs], dim=1), weight)
        else:
            for part, other in theirs:
                assert torch.equal(part, weight), place
                assert_equal(other, bias)
    assert seen >= {*SUMMED, "qkv", "embedding", "lm_head", "gate_up" if "gate_up" in seen else "up"}


def assert_stacked(name: str, parts: list[Tensor], whole: Tensor, config: ModelConfig) -> None:
    """Of K and V the ranks have what their KV heads say, of all else each row once."""
    shards = [config.shard(rank, len(parts)) for rank in range(len(parts))]
    cut = [part.split(rows_of(name, shard, len(part))) for part, shard in zip(parts, shards, strict=True)]
    for index, expected in enumerate(whole.split(rows_of(name, config, len(whole)))):
        found = [matrices[index] for matrices in cut]
        if name == "qkv" and index > 0:
            heads = expected.unflatten(0, (config.num_kv_heads, -1))
            for own, shard in zip(found, shards, strict=True):
                assert shard.sharded is not None
                assert torch.equal(own, heads[list(shard.sharded.kv_heads)].flatten(0, 1)), (name, index)
        else:
            assert torch.equal(torch.cat(found), expected), (name, index)


def assert_equal(one: Tensor | None, other: Tensor | None) -> None:
    assert (one is None) == (other is None)
    assert one is None or other is None or torch.equal(one, other)


def opened(path: Path) -> tuple[TensorSource, ModelConfig]:
    config = parse_model_config(open_model(path).config())
    return open_tensors(path, config, CPU).__enter__(), config


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_ranks_of_a_checkpoint_have_its_weights(name: str, size: int, tmp_path: Path) -> None:
    family, options = FAMILIES[name]
    assert_shared_out(*opened(write_checkpoint(tmp_path / "model", family, **options)), size)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", IN_GGUF)
def test_the_ranks_of_a_gguf_file_have_its_weights(name: str, size: int, tmp_path: Path) -> None:
    """Four ranks cut blocks of 32 numbers: each has 16 columns of the attention's output, and 24 of the MLP's."""
    family, options = FAMILIES[name]
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family, **options)
    assert_shared_out(*opened(write_gguf(tmp_path / "model.gguf", checkpoint, GGMLQuantizationType.Q8_0)), size)


def test_the_ranks_of_a_model_without_weights_have_those_of_one_worker(tmp_path: Path) -> None:
    """And every rank opens the source by its own configuration."""
    config = parse_model_config(open_model(write_checkpoint(tmp_path / "model", "qwen2")).config())
    assert_shared_out(DummyTensors(config, shapes_of(config), CPU), config, 2)
    own = config.shard(1, 2)
    with open_tensors(None, own, CPU) as source:
        assert load(source, own).keys() == dict(load(DummyTensors(config, shapes_of(config), CPU), config)).keys()


def test_a_rank_opens_a_gguf_file_by_its_own_configuration(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", write_checkpoint(tmp_path / "checkpoint"))
    source, config = opened(path)
    own = config.shard(1, 2)
    with open_tensors(path, own, CPU) as by_rank:
        expected = load(source, own)
        for place, (weight, _) in load(by_rank, own).items():
            assert torch.equal(weight, expected[place][0]), place


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def config_of(**changes: Any) -> ModelConfig:
    return replace(parse_model_config(LLAMA), **changes)


WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "gpt-oss": {},
    "mixtral": {"num_local_experts": 5},
    "qwen2-moe": {"mlp_only_layers": [0]},
    "qwen3-moe": {},
    "deepseek-v2": {},
    "deepseek-v3": {"first_k_dense_replace": 1},
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_the_ranks_of_a_model_share_out_whole_experts(name: str, size: int, tmp_path: Path) -> None:
    """Each expert is on one rank, as it is in the whole model; `load` sees that nothing else is read."""
    directory = write_checkpoint(tmp_path / "model", name.replace("-", "_"), **WITH_EXPERTS[name])
    source, config = opened(directory)
    assert isinstance(config, DecoderConfig)
    assert config.experts is not None
    whole, seen, numbers = load(source, config), set[str](), []
    for rank in range(size):
        own = config.shard(rank, size, expert_parallel=True)
        assert own.experts is not None
        numbers.append(len(own.experts.own))
        for place, (weight, bias) in load(source, own).items():
            layer, _, product = place.partition(".experts.")
            if product:
                expert, _, kind = product.partition(".")
                of_whole = f"{layer}.experts.{own.experts.own[int(expert)]}.{kind}"
                assert of_whole not in seen, "on two ranks"
                seen.add(of_whole)
                assert torch.equal(weight, whole[of_whole][0])
                assert_equal(bias, whole[of_whole][1])
    assert seen == {place for place in whole if ".experts." in place}
    assert sum(numbers) == config.experts.num_experts
    assert max(numbers) - min(numbers) <= 1


def test_whole_experts_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ModelError, match=r"^--expert-parallel is for models with experts: this one has none$"):
        config_of().shard(0, 2, expert_parallel=True)
    mixtral = LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3}
    config = parse_model_config(mixtral)
    with pytest.raises(ModelError, match=r"^4 ranks cannot share 3 experts$"):
        config.shard(0, 4, expert_parallel=True)
    assert config.shard(2, 4).num_kv_heads == 1, "which share the columns of three experts"
    odd = LLAMA | {"architectures": ["Qwen2MoeForCausalLM"], "moe_intermediate_size": 7, "num_experts": 4}
    with pytest.raises(ModelError, match="2 ranks cannot share 7 columns of an expert"):
        parse_model_config(odd | {"shared_expert_intermediate_size": 8}).shard(0, 2)
    parse_model_config(odd | {"shared_expert_intermediate_size": 8}).shard(0, 2, expert_parallel=True)
    with pytest.raises(ModelError, match="2 ranks cannot share 7 columns of the shared expert"):
        parse_model_config(odd | {"shared_expert_intermediate_size": 7}).shard(0, 2, expert_parallel=True)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 20), st.integers(0, 1000))
def test_each_query_head_is_where_its_kv_head_is(num_kv_heads: int, group: int, size: int, more_columns: int) -> None:
    """And none is missing, or on two ranks; the same of columns of the MLP. No rank has nothing, or far more than
    another.
    """
    num_heads, columns = num_kv_heads * group, 2 * (size + more_columns)
    config = config_of(num_heads=num_heads, num_kv_heads=num_kv_heads, intermediate_size=columns)
    if group < -(-size // num_kv_heads) and size > num_kv_heads:
        with pytest.raises(ModelError, match=f"{size} ranks cannot share"):
            config.shard(0, size)
        return
    heads: list[int] = []
    places: list[int] = []
    of_ranks: list[tuple[int, int]] = []
    for rank in range(size):
        own = config.shard(rank, size)
        assert own.sharded is not None
        shard = own.sharded
        assert (len(shard.heads), len(shard.kv_heads)) == (own.num_heads, own.num_kv_heads)
        assert len(shard.intermediate) == own.intermediate_size
        assert own.intermediate_size % 2 == 0
        own_group = own.num_heads // own.num_kv_heads
        assert own_group * own.num_kv_heads == own.num_heads
        assert [head // group for head in shard.heads] == [shard.kv_heads[i // own_group] for i in range(own.num_heads)]
        heads += shard.heads
        places += shard.intermediate
        of_ranks.append((own.num_kv_heads, own.intermediate_size))
    assert heads == list(range(num_heads))
    assert places == list(range(columns))
    (fewest_heads, fewest_columns), (most_heads, most_columns) = min(of_ranks), max(of_ranks)
    assert most_heads - fewest_heads <= 1
    assert 0 < most_columns <= fewest_columns + max(2, fewest_columns // 8)


def test_columns_of_codes_are_cut_where_groups_begin() -> None:
    config = config_of(intermediate_size=11008, num_heads=32, num_kv_heads=8)  # Llama 2 7B's
    for rank in range(4):
        own = config.shard(rank, 4).sharded
        assert own is not None
        assert own.intermediate.start % 128 == own.intermediate.stop % 128 == 0


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({"num_kv_heads": 1}, 5, "5 ranks cannot share 4 attention heads"),
        (
            {"intermediate_size": 6},
            4,
            "4 ranks cannot share 6 columns of the MLP: each has an even number of them, at least two",
        ),
        (
            {"intermediate_size": 97},
            2,
            "2 ranks cannot share 97 columns of the MLP: each has an even number of them, at least two",
        ),
        ({"num_heads": 12, "num_kv_heads": 6, "intermediate_size": 20}, 13, "13 ranks cannot share 12 attention heads"),
        ({"num_heads": 7, "num_kv_heads": 7}, 4, None),
        ({"num_heads": 9, "num_kv_heads": 3}, 2, None),
        ({"num_heads": 9, "num_kv_heads": 3}, 4, None),
    ],
)
def test_what_would_leave_a_rank_without_anything_is_refused(
    changes: dict[str, Any], size: int, words: str | None
) -> None:
    with nullcontext() if words is None else pytest.raises(ModelError, match=f"^{words}$"):
        config_of(**changes).shard(0, size)


def test_a_rank_differs_from_the_whole_in_heads_and_mlp_alone() -> None:
    config = config_of()
    own = config.shard(1, 2)
    expected = replace(config, num_heads=2, num_kv_heads=1, intermediate_size=48, sharded=own.sharded)
    assert own == expected
    assert own.whole is config is config.whole
    assert shapes_of(own) == shapes_of(config)
    assert num_parameters(config) == sum(math.prod(shape) for shape in shapes_of(config).values())


def test_ranks_have_the_ids_of_the_whole_models_weights(tmp_path: Path) -> None:
    """These are in the names of KV, which does not depend on how many ranks made it."""
    path = write_checkpoint(tmp_path / "model")
    config = parse_model_config(open_model(path).config())
    for identity in (lambda one: weights_id(weight_files(path), one), lambda one: dummy_id(one, CPU)):
        assert len({identity(one) for one in (config, *(config.shard(rank, 4) for rank in range(4)))}) == 1
        assert identity(config) != identity(replace(config, num_heads=2))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_rank_has_the_scales_of_its_kv_heads(size: int, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", num_key_value_heads=4, num_attention_heads=8)
    path = directory / "model.safetensors"
    with open_tensors(directory, parse_model_config(open_model(directory).config()), CPU) as source:
        tensors = {name: source.read(name, torch.float32).clone() for name in source.names}
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    tensors["model.layers.1.self_attn.v_scale"] = torch.tensor([7.0])
    save_tensors(path, tensors)
    source, config = opened(directory)
    for rank in range(size):
        scales = read_kv_scales(source, own := config.shard(rank, size))
        assert scales is not None
        assert own.sharded is not None
        assert scales.k.tolist() == [[1.0 + head for head in own.sharded.kv_heads], [1.0] * own.num_kv_heads]
        assert scales.v.tolist() == [[1.0] * own.num_kv_heads, [7.0] * own.num_kv_heads]
