"""The choice of experts and their grouped products, against float64."""

from dataclasses import replace

import torch
from torch import Tensor

from services.engine.kernels.gpu.experts import ExpertStacks, grouped_mlp
from services.engine.kernels.gpu.routing import route
from services.engine.kernels.gpu.stacked_experts import CodedExperts
from services.engine.kernels.routing_numbers import RoutingNumbers, Scores
from services.engine.quantization.codes import Code, CodedMatrix, Inputs
from tests.gpu.checks.buffers import within
from tests.gpu.checks.coded import random_matrix
from tests.gpu.checks.errors import BOUNDS, compare, exactly, relative_error
from tests.gpu.checks.result import Check
from tests.gpu.checks.source import DTYPES, Source, cases

_CHOICES = (
    RoutingNumbers(8, 2, normalized=True),
    RoutingNumbers(60, 4),
    RoutingNumbers(64, 8, normalized=True),
    RoutingNumbers(3, 3, Scores.SIGMOID),
    RoutingNumbers(32, 4, Scores.SOFTMAX_OF_CHOSEN),
    RoutingNumbers(160, 6, num_groups=8, groups_kept=3, scaling=16.0),
    RoutingNumbers(256, 8, Scores.SIGMOID, True, 2.5, 8, 4, True),
    RoutingNumbers(21, 5, Scores.SIGMOID, True, 1.5, 7, 3, True),
)

_STORED = (
    (Code.UINT4, Inputs.AS_THEY_ARE),
    (Code.E2M1, Inputs.AS_THEY_ARE),
    (Code.E4M3, Inputs.AS_THEY_ARE),
    (Code.INT8, Inputs.INT8),
    (Code.E4M3, Inputs.E4M3_GROUPS),
)
_FROM_UNROUNDED = 0.08  # two products whose inputs are rounded to 3 bits of mantissa, each off by 0.026


def check(device: torch.device, seed: int, num_cases: int) -> list[Check]:
    """Checks `num_cases` random cases of each."""
    return [
        *cases(_route, device, seed, num_cases),
        *cases(_grouped_mlp, device, seed, num_cases),
        *cases(_grouped_coded_mlp, device, seed, num_cases),
    ]


def _route(source: Source, name: str) -> list[Check]:
    choice, num_tokens = source.choices.choice(_CHOICES), source.num_rows()
    logits = within(source.normal(num_tokens, choice.num_experts, dtype=torch.float32), choice.num_experts + 5)
    correction = source.normal(choice.num_experts, dtype=torch.float32) if source.choices.random() < 0.5 else None
    chosen, weights = route(logits, choice, correction)
    expected, of_expected = _chosen(logits.double().cpu(), choice, None if correction is None else correction.cpu())
    name = f"route {choice} {'with' if correction is not None else 'without'} correction {name}"
    return [
        exactly(f"{name}: experts", chosen.cpu().long().equal(expected)),
        compare(name, weights, of_expected, logits.dtype),
    ]


def _chosen(logits: Tensor, choice: RoutingNumbers, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Computes experts and weights token by token, from the words of the papers."""
    of_group = choice.num_experts // choice.num_groups
    chosen, weights = [], []
    for row in logits:
        scores = {"softmax": row.softmax(0), Scores.SIGMOID: row.sigmoid()}.get(choice.scores, row)
        ranked = (scores if correction is None else scores + correction.double()).tolist()
        groups = [sorted(ranked[g * of_group : (g + 1) * of_group], reverse=True) for g in range(choice.num_groups)]
        sizes = [sum(group[: 2 if choice.sums_best_two else 1]) for group in groups]
        kept = sorted(range(choice.num_groups), key=lambda g: -sizes[g])[: choice.groups_kept]
        allowed = [expert for expert in range(choice.num_experts) if expert // of_group in kept]
        best = sorted(allowed, key=lambda expert: -ranked[expert])[: choice.top_k]
        own = scores[best]
        if choice.scores == Scores.SOFTMAX_OF_CHOSEN:
            own = own.softmax(0)
        chosen.append(best)
        weights.append((own / own.sum() if choice.normalized else own) * choice.scaling)
    return torch.tensor(chosen), torch.stack(weights)


def _grouped_mlp(source: Source, name: str) -> list[Check]:
    choices, device = source.choices, source.device
    dtype, num_tokens = choices.choice(DTYPES), source.num_rows()
    num_experts, most = choices.choice((2, 5, 16)), 6 if device.type == "cpu" else 40
    top_k = choices.randint(1, min(4, num_experts))
    hidden, width = (16 * choices.randint(1, most) + choices.choice((0, 8)) for _ in range(2))
    has_bias, swiglu = choices.random() < 0.5, choices.choice((None, (0.7, 1.702)))

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return within((source.normal(*shape, dtype=torch.float32) * scale).to(dtype))

    x = within(source.normal(num_tokens, hidden, dtype=dtype), hidden + choices.choice((0, 24)))
    stacks = ExpertStacks(
        normal(num_experts, 2 * width, hidden, scale=hidden**-0.5),
        normal(num_experts, hidden, width, scale=width**-0.5),
        normal(num_experts, 2 * width) if has_bias else None,
        normal(num_experts, hidden) if has_bias else None,
    )
    chosen, weights = _drawn(source, num_tokens, top_k, num_experts)
    y = grouped_mlp(x, chosen, weights, stacks, swiglu)
    expected = torch.stack([_made_of(token, x, chosen, weights, stacks, swiglu) for token in range(num_tokens)])
    name = f"{top_k} of {num_experts} experts {hidden} x {width}, {num_tokens} tokens, {dtype} {name}"
    return [compare(name, y, expected, dtype)]


def _grouped_coded_mlp(source: Source, name: str) -> list[Check]:
    choices, dtype, num_tokens = source.choices, source.choices.choice(DTYPES), source.num_rows()
    num_experts, most = choices.choice((2, 5)), 6 if source.device.type == "cpu" else 40
    top_k, (code, inputs) = choices.randint(1, 2), choices.choice(_STORED)
    group, of_width = (
        choices.choice(sizes) for sizes in ((32, 64), (16, 8) if inputs is Inputs.AS_THEY_ARE else (64,))
    )
    hidden, width = group * choices.randint(1, most // 2), of_width * choices.randint(1, most)
    has_bias, swiglu = choices.random() < 0.5, choices.choice((None, (0.7, 1.702)))

    def matrices(out: int, depth: int) -> list[CodedMatrix]:
        """Returns a matrix of each expert, all stored alike."""
        of_all = replace(random_matrix(source, code, num_experts * out, depth, group, inputs), order=None)
        return [of_all.rows(expert * out, (expert + 1) * out) for expert in range(num_experts)]

    def biases(out: int) -> Tensor | None:
        return source.normal(num_experts, out, dtype=dtype) if has_bias else None

    gate_ups, downs = matrices(2 * width, hidden), matrices(hidden, width)
    own = biases(2 * width), biases(hidden)
    experts = CodedExperts(RoutingNumbers(num_experts, top_k), swiglu)
    for expert, weights in enumerate(zip(gate_ups, downs, strict=True)):
        experts.put_codes(expert, *weights, *(None if bias is None else bias[expert] for bias in own))
    x = within(source.normal(num_tokens, hidden, dtype=dtype), hidden + choices.choice((0, 24)))
    choice = _drawn(source, num_tokens, top_k, num_experts)
    of_gate_ups, of_downs = (torch.stack([one.numbers(torch.float64) for one in all]) for all in (gate_ups, downs))
    stacks = ExpertStacks(of_gate_ups, of_downs, *own)
    expected = torch.stack([_made_of(token, x, *choice, stacks, swiglu) for token in range(num_tokens)])
    about = f"{code.value} by {group} of {inputs.value}, {dtype}"
    name = f"{top_k} of {num_experts} coded experts {hidden} x {width}, {num_tokens} tokens, {about} {name}"
    bound = BOUNDS[dtype] if inputs is Inputs.AS_THEY_ARE else _FROM_UNROUNDED
    return [Check(name, relative_error(experts(x, choice, None, None), expected), bound)]


def _drawn(source: Source, num_tokens: int, top_k: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Returns experts and weights of tokens: a third of the experts has most of the tokens."""
    favoured = torch.rand((num_tokens, num_experts), generator=source.generator) + torch.arange(num_experts) % 3
    chosen = favoured.topk(top_k).indices.to(source.device, torch.int32)
    return chosen, source.normal(num_tokens, top_k, dtype=torch.float32).abs()


def _made_of(
    token: int, x: Tensor, chosen: Tensor, weights: Tensor, stacks: ExpertStacks, swiglu: tuple[float, float] | None
) -> Tensor:
    total = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    for expert, weight in zip(chosen[token].tolist(), weights[token].double(), strict=True):
        gate_up = stacks.gate_up[expert].double() @ x[token].double()
        if stacks.gate_up_bias is not None:
            gate_up = gate_up + stacks.gate_up_bias[expert].double()
        gate, up = gate_up.chunk(2)
        if swiglu is None:
            inner = gate * gate.sigmoid() * up
        else:
            limit, alpha = swiglu
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = gate * (alpha * gate).sigmoid() * (up + 1)
        outer = stacks.down[expert].double() @ inner
        total += weight * (outer if stacks.down_bias is None else outer + stacks.down_bias[expert].double())
    return total
