"""Layers of experts as parts: what they compute is what the modules of `transformers` compute."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, Qwen2MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from services.engine.kernels.torch_operations import TorchOperations
from services.engine.models.architectures import parse_model_config
from services.engine.models.checkpoint import Checkpoint
from services.engine.models.config import DecoderConfig
from services.engine.models.expert_tensors import DEEPSEEK, GPT_OSS, QWEN, ExpertNames, expert_shapes, expert_shares
from services.engine.models.experts import ExpertsMlp, load_experts
from services.engine.models.experts_config import (
    Experts,
    deepseek_v2_experts,
    deepseek_v3_experts,
    gpt_oss_experts,
    qwen2_experts,
)
from services.engine.models.settings import ConfigSettings
from services.engine.models.tensors import Tensors
from tests.checkpoints import save_tensors
from tests.engine.thread_ranks import Meeting, ThreadRanks

HIDDEN, PREFIX = 32, "model.layers.0."
OF_DEEPSEEK: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts_per_tok": 3, "first_k_dense_replace": 0}
BLOCKS: dict[str, tuple[Any, type[nn.Module], Callable[[ConfigSettings, int], Experts], ExpertNames]] = {
    "deepseek-v2": (
        DeepseekV2Config(
            **OF_DEEPSEEK | {"hidden_size": HIDDEN, "n_routed_experts": 8, "topk_method": "group_limited_greedy"},
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.0,
        ),
        DeepseekV2Moe,
        deepseek_v2_experts,
        DEEPSEEK,
    ),
    "deepseek-v3": (
        DeepseekV3Config(
            **OF_DEEPSEEK | {"hidden_size": HIDDEN, "n_routed_experts": 12, "n_group": 3, "topk_group": 2}
        ),
        DeepseekV3MoE,
        deepseek_v3_experts,
        DEEPSEEK,
    ),
    "gpt-oss": (
        GptOssConfig(hidden_size=HIDDEN, intermediate_size=24, num_local_experts=6, num_experts_per_tok=2),
        GptOssMLP,
        gpt_oss_experts,
        GPT_OSS,
    ),
    "gpt-oss-other-clamp": (
        GptOssConfig(
            hidden_size=HIDDEN,
            intermediate_size=8,
            num_local_experts=3,
            num_experts_per_tok=3,
            swiglu_limit=0.5,
            swiglu_alpha=3.0,
        ),
        GptOssMLP,
        gpt_oss_experts,
        GPT_OSS,
    ),
    "qwen2": (
        Qwen2MoeConfig(hidden_size=HIDDEN, num_experts=5, moe_intermediate_size=8, shared_expert_intermediate_size=12),
        Qwen2MoeSparseMoeBlock,
        qwen2_experts,
        QWEN,
    ),
}


def block_of(name: str) -> nn.Module:
    """A block of `transformers` with random weights, whose experts run one after the other."""
    config, make, _, _ = BLOCKS[name]
    config._experts_implementation = "eager"
    block = make(config)
    torch.manual_seed(3)
    for key, values in (*block.named_parameters(), *block.named_buffers()):
        values.data.normal_(std=1.0 if "bias" in key else values.shape[-1] ** -0.5)
    return block


def tensors_of(block: nn.Module, names: ExpertNames) -> dict[str, Tensor]:
    """Its tensors as checkpoints have them."""
    found = {f"{PREFIX}mlp.{key}": values for key, values in block.state_dict().items()}
    if names.in_one_tensor:
        return found
    gate_ups, downs = (found.pop(f"{PREFIX}mlp.experts.{key}") for key in ("gate_up_proj", "down_proj"))
    for expert, (gate_up, down) in enumerate(zip(gate_ups, downs, strict=True)):
        of_expert = zip(names.of_expert(expert), (*gate_up.chunk(2), down), strict=True)
        found |= {f"{PREFIX}{name}.weight": values.clone() for name, values in of_expert}
    return found


def config_with(experts: Experts) -> DecoderConfig:
    config = parse_model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 320,
            "hidden_size": HIDDEN,
            "intermediate_size": 96,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
        }
    )
    assert isinstance(config, DecoderConfig)
    return replace(config, experts=experts)


def load(directory: Path, config: DecoderConfig, names: ExpertNames) -> ExpertsMlp:
    shares = {}
    if config.sharded is not None:
        assert isinstance(config.whole, DecoderConfig)
        assert config.whole.experts is not None
        of_layer = expert_shares(names, config.whole.experts, config.sharded)
        shares = {f"{PREFIX}{name}": share for name, share in of_layer.items()}
    with Checkpoint(directory) as checkpoint:
        tensors = Tensors(checkpoint, torch.float32, fused=False, shares=shares, on_read=lambda _: None)
        mlp = load_experts(names, tensors, config, 0)
    if config.sharded is not None:
        assert tensors.ranks is not None
        tensors.ranks.connect(ThreadRanks(Meeting(1), 0))  # which gets back what it comes with
    assert isinstance(mlp, ExpertsMlp)
    return mlp


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_computes_what_transformers_computes_alone_and_on_ranks(name: str, tmp_path: Path) -> None:
    settings, _, read, names = BLOCKS[name]
    block, experts = block_of(name), read(ConfigSettings(settings.to_dict()), 1)
    stored = tensors_of(block, names)
    shapes = {f"{PREFIX}{key}": shape for key, shape in expert_shapes(names, experts, HIDDEN).items()}
    assert {key: tuple(values.shape) for key, values in stored.items()} == shapes
    save_tensors(tmp_path / "model.safetensors", stored)
    config, x = config_with(experts), torch.randn(30, HIDDEN)
    with torch.inference_mode():
        expected = block(x[None])
        expected = expected[0] if isinstance(expected, tuple) else expected
        feed = partial(ExpertsMlp.forward, x=x, operations=TorchOperations())
        torch.testing.assert_close(feed(load(tmp_path, config, names)), expected[0], atol=1e-5, rtol=1e-4)
        for size, expert_parallel in ((2, False), (2, True), (3, True)):
            ranks = [config.shard(rank, size, expert_parallel=expert_parallel) for rank in range(size)]
            total = torch.stack([feed(load(tmp_path, rank, names)) for rank in ranks]).sum(dim=0)
            torch.testing.assert_close(total, expected[0], atol=1e-5, rtol=1e-4)
