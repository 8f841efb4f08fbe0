"""The experts of Qwen3-30B-A3B and gpt-oss, and the choice of DeepSeek-V3's, for few tokens and for many."""

from functools import partial

import torch
from torch import Tensor

from services.engine.kernels.expert_tally import ExpertTally
from services.engine.kernels.gpu.experts import ExpertStacks, grouped_mlp
from services.engine.kernels.gpu.routing import route
from services.engine.kernels.routing_numbers import RoutingNumbers, Scores
from tests.gpu.compiled import Variant, of_launch


def variants() -> list[Variant]:
    """See `tests.gpu.compiled`."""
    qwen, deepseek = (
        RoutingNumbers(128, 8, normalized=True),
        RoutingNumbers(256, 8, Scores.SIGMOID, True, 2.5, 8, 4, True),
    )
    return [
        *of_launch("route 8 of 128", lambda: route(_empty(7, 128), qwen)),
        *of_launch("route 8 of 256 in groups", lambda: route(_empty(7, 256), deepseek, _empty(256))),
        *of_launch("16 rows, 8 of 128", partial(_grouped_mlp, 7, 8, 128, 2048, 768)),
        *of_launch("64 rows, 8 of 128", partial(_grouped_mlp, 512, 8, 128, 2048, 768)),
        *of_launch("128 rows, 8 of 128", partial(_grouped_mlp, 4096, 8, 128, 2048, 768)),
        *of_launch("128 rows, 4 of 32, clamped", partial(_grouped_mlp, 4096, 4, 32, 2880, 2880, has_bias=True)),
    ]


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _grouped_mlp(
    num_tokens: int, top_k: int, num_experts: int, hidden: int, width: int, *, has_bias: bool = False
) -> None:
    stacks = ExpertStacks(
        _empty(num_experts, 2 * width, hidden),
        _empty(num_experts, hidden, width),
        _empty(num_experts, 2 * width) if has_bias else None,
        _empty(num_experts, hidden) if has_bias else None,
    )
    chosen = _empty(num_tokens, top_k, dtype=torch.int32)
    weights = _empty(num_tokens, top_k, dtype=torch.float32)
    swiglu = (7.0, 1.702) if has_bias else None
    tally = ExpertTally(_empty(num_experts, dtype=torch.int64), _empty(1, dtype=torch.int32))
    grouped_mlp(_empty(num_tokens, hidden), chosen, weights, stacks, swiglu, tally)
