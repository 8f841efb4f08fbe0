"""One layer's experts, their choice included, against the card's copy bandwidth and matrix rate."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from loadtest.gpu.card import Card, kernel_s
from loadtest.tables import Record
from services.engine.kernels.gpu.experts import ExpertStacks, grouped_mlp
from services.engine.kernels.gpu.routing import route
from services.engine.kernels.routing_numbers import RoutingNumbers

_TOKENS = (1, 16, 64, 512, 4096)


@dataclass(frozen=True, slots=True)
class Layer:
    """The experts of one layer of a published model."""

    name: str
    choice: RoutingNumbers
    hidden: int
    width: int


LAYERS = (
    Layer("Qwen3-30B-A3B", RoutingNumbers(128, 8, normalized=True), 2048, 768),
    Layer("Mixtral-8x7B", RoutingNumbers(8, 2, normalized=True), 4096, 14336),
)


def measure(
    card: Card,
    device: torch.device,
    layers: Sequence[Layer] = LAYERS,
    tokens: Sequence[int] = _TOKENS,
    seconds_of: Callable[[Callable[[], object]], float] = kernel_s,
) -> Iterator[Record]:
    """Yields a record for each layer and number of tokens, whose experts are drawn evenly."""
    for layer in layers:
        num_experts, hidden, width = layer.choice.num_experts, layer.hidden, layer.width
        stacks = ExpertStacks(
            _normal(device, num_experts, 2 * width, hidden), _normal(device, num_experts, hidden, width)
        )
        for num_tokens in tokens:
            yield _record(card, layer, stacks, _normal(device, num_tokens, hidden), seconds_of)


def _record(
    card: Card,
    layer: Layer,
    stacks: ExpertStacks,
    x: torch.Tensor,
    seconds_of: Callable[[Callable[[], object]], float],
) -> Record:
    num_tokens = len(x)
    logits = _normal(x.device, num_tokens, layer.choice.num_experts)
    taken = seconds_of(lambda: grouped_mlp(x, *route(logits, layer.choice), stacks))
    chosen = len(route(logits, layer.choice)[0].unique())
    of_expert = 3 * layer.hidden * layer.width
    return {
        "layer": layer.name,
        "tokens": num_tokens,
        "experts": chosen,
        "us": taken * 1e6,
        "of_copy_bandwidth": chosen * of_expert * x.itemsize / taken / card.bytes_per_s,
        "of_matrix_rate": 2 * num_tokens * layer.choice.top_k * of_expert / taken / card.flops_per_s,
    }


def _normal(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
