"""A token's experts and their weights are those that the routers of `transformers` choose."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from services.engine.kernels.routing_numbers import Scores
from services.engine.models.experts_config import (
    Experts,
    deepseek_v2_experts,
    deepseek_v3_experts,
    gpt_oss_experts,
    mixtral_experts,
    qwen2_experts,
    qwen3_experts,
)
from services.engine.models.routing import route
from services.engine.models.settings import ConfigSettings
from services.protocol.model_files.base import ModelError

HIDDEN, TOKENS, LAYERS = 32, 50, 6
Read = Callable[[ConfigSettings, int], Experts]
FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[nn.Module], Read]] = {
    "mixtral": (MixtralConfig, MixtralTopKRouter, mixtral_experts),
    "qwen2": (Qwen2MoeConfig, Qwen2MoeTopKRouter, qwen2_experts),
    "qwen3": (Qwen3MoeConfig, Qwen3MoeTopKRouter, qwen3_experts),
    "deepseek-v2": (DeepseekV2Config, DeepseekV2TopkRouter, deepseek_v2_experts),
    "deepseek-v3": (DeepseekV3Config, DeepseekV3TopkRouter, deepseek_v3_experts),
    "gpt-oss": (GptOssConfig, GptOssTopKRouter, gpt_oss_experts),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 5}),
    ("qwen2", {"num_experts": 60, "num_experts_per_tok": 4}),
    ("qwen2", {"num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    ("qwen3", {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}),
    ("qwen3", {"num_experts": 9, "num_experts_per_tok": 1}),
    ("deepseek-v2", {"n_routed_experts": 64, "num_experts_per_tok": 6}),
    (
        "deepseek-v2",
        {"n_routed_experts": 24, "num_experts_per_tok": 5, "topk_method": "group_limited_greedy", "n_group": 6}
        | {"topk_group": 2, "routed_scaling_factor": 16.0},
    ),
    ("deepseek-v3", {"n_routed_experts": 256, "num_experts_per_tok": 8}),
    ("deepseek-v3", {"n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}),
    (
        "deepseek-v3",
        {"n_routed_experts": 10, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    ("gpt-oss", {"num_local_experts": 32, "num_experts_per_tok": 4}),
    ("gpt-oss", {"num_local_experts": 6, "num_experts_per_tok": 1}),
]


def experts_of(family: str, **settings: Any) -> tuple[Experts, PreTrainedConfig]:
    make, _, read = FAMILIES[family]
    config = make(hidden_size=HIDDEN, **settings)
    return read(ConfigSettings(config.to_dict()), LAYERS), config


def router_of(family: str, config: PreTrainedConfig) -> nn.Module:
    """A router with random weights, whose biases change what is chosen."""
    router = FAMILIES[family][1](config)
    torch.manual_seed(5)
    for values in (*router.parameters(), *router.buffers()):
        values.data.normal_()
    return router


def by_expert(chosen: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    """Each token's weight for every expert, 0 for those that were not chosen."""
    return torch.zeros(len(chosen), num_experts).scatter_(1, chosen, weights)


@pytest.mark.parametrize(("family", "settings"), CASES)
def test_weights_are_those_of_transformers(family: str, settings: dict[str, Any]) -> None:
    experts, config = experts_of(family, **settings)
    router = router_of(family, config)
    with torch.inference_mode():
        logits, weights, chosen = router(torch.randn(TOKENS, HIDDEN))
        correction = router.e_score_correction_bias if experts.corrected else None
        found = route(logits, experts, correction)
    assert found[0].shape == (TOKENS, experts.top_k)
    assert found[1].dtype == torch.float32
    expected = by_expert(chosen, weights, experts.num_experts)
    torch.testing.assert_close(by_expert(*found, experts.num_experts), expected, atol=1e-6, rtol=1e-5)
    assert (expected.count_nonzero(dim=1) == experts.top_k).all()


def test_a_correction_changes_the_choice_and_no_weight() -> None:
    experts = Experts(num_experts=4, top_k=1, intermediate_size=1, layers=(0,), scores=Scores.SIGMOID, corrected=True)
    chosen, weights = route(torch.tensor([[3.0, 1.0, 0.0, -1.0]]), experts, torch.tensor([0.0, 0.0, 5.0, 0.0]))
    assert (chosen.tolist(), weights.tolist()) == ([[2]], [[0.5]])


def test_of_equal_scores_lower_numbers_are_chosen() -> None:
    experts = Experts(num_experts=6, top_k=3, intermediate_size=1, layers=(0,))
    chosen, weights = route(torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]]), experts)
    assert chosen.tolist() == [[1, 3, 0]]
    assert weights.sum() < 1


def test_scores_of_nothing_but_0_leave_finite_weights() -> None:
    experts = Experts(num_experts=4, top_k=2, intermediate_size=1, layers=(0,), scores=Scores.SIGMOID, normalized=True)
    assert route(torch.full((1, 4), -200.0), experts)[1].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"decoder_sparse_step": 4}, (3,)),
        ({"mlp_only_layers": [0, 5]}, (1, 2, 3, 4)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (5,)),
    ],
)
def test_layers_with_experts(settings: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert experts_of("qwen3", **settings)[0].layers == expected


def test_the_first_layers_of_deepseek_are_dense() -> None:
    assert experts_of("deepseek-v3")[0].layers == (3, 4, 5)
    assert experts_of("deepseek-v2", first_k_dense_replace=1, num_experts_per_tok=6)[0].layers == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("family", "settings", "named"),
    [
        ("mixtral", {"num_local_experts": 4, "num_experts": 8}, "num_experts 8 differs"),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 5, "intermediate_size": 8}, "5 experts of each"),
        ("qwen3", {"mlp_only_layers": "0"}, "mlp_only_layers '0'"),
        ("deepseek-v2", {"topk_method": "noaux_tc", "num_experts_per_tok": 6}, "topk_method 'noaux_tc'"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob True"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("deepseek-v3", {"n_routed_experts": 20}, "20 experts cannot be in 8 groups"),
        ("deepseek-v3", {"n_routed_experts": 8}, "8 experts cannot be in 8 groups"),
        ("gpt-oss", {"num_experts_per_tok": 4, "experts_per_token": 2}, "experts_per_token 2 differs"),
    ],
)
def test_experts_that_cannot_be_are_refused(family: str, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        FAMILIES[family][2](ConfigSettings(settings), LAYERS)
    assert named in str(caught.value)
