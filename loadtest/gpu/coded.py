"""Products and experts whose weights are codes, against the same in bfloat16 on this card.

A row names the way of storing and the rows of x. Beside microseconds it has what bfloat16 takes: cuBLAS's product, or
the grouped product of experts; how much sooner codes are; and what was read and multiplied, of the card's rates.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from loadtest.gpu.card import Card, kernel_s
from loadtest.tables import Record
from services.engine.kernels.gpu.coded_linear import CodedProduct
from services.engine.kernels.gpu.experts import ExpertStacks, grouped_mlp
from services.engine.kernels.gpu.packed_codes import pack
from services.engine.kernels.gpu.stacked_experts import CodedExperts
from services.engine.kernels.routing_numbers import RoutingNumbers
from services.engine.quantization.codes import Code, CodedMatrix, Inputs

_ROWS = (1, 16, 64, 512, 4096)
_TOKENS = (1, 64, 4096)
_COPIES_BYTES = 256 << 20  # of bfloat16 weights in turns: many times the largest cache

Seconds = Callable[[Callable[[], object]], float]


@dataclass(frozen=True, slots=True)
class Way:
    """A way of storing. group: None for one scale for each row."""

    code: Code
    group: int | None
    inputs: Inputs = Inputs.AS_THEY_ARE
    has_offsets: bool = False

    @property
    def name(self) -> str:
        """Returns the way in words."""
        group = "row" if self.group is None else str(self.group)
        inputs = "" if self.inputs is Inputs.AS_THEY_ARE else f" x {self.inputs.value}"
        return f"{self.code.value} by {group}{' with offsets' if self.has_offsets else ''}{inputs}"


@dataclass(frozen=True, slots=True)
class Layer:
    """The experts of one layer of a published model."""

    name: str
    choice: RoutingNumbers
    hidden: int
    width: int


WAYS = (
    Way(Code.UINT4, 32),
    Way(Code.UINT4, 128, has_offsets=True),
    Way(Code.E2M1, 32),
    Way(Code.INT8, 32),
    Way(Code.E4M3, None),
    Way(Code.E4M3, 128),
    Way(Code.E4M3, None, Inputs.E4M3),
    Way(Code.E4M3, 128, Inputs.E4M3_GROUPS),
    Way(Code.INT8, None, Inputs.INT8),
)
OF_EXPERTS = (Way(Code.UINT4, 128, has_offsets=True), Way(Code.E2M1, 32), Way(Code.E4M3, 128, Inputs.E4M3_GROUPS))
LAYERS = (Layer("Qwen3-30B-A3B", RoutingNumbers(128, 8, normalized=True), 2048, 768),)


def measure(
    card: Card,
    device: torch.device,
    shapes: Sequence[tuple[int, int]],
    rows: Sequence[int] = _ROWS,
    ways: Sequence[Way] = WAYS,
    seconds_of: Seconds = kernel_s,
) -> Iterator[Record]:
    """Yields a record for each shape [out, in], number of rows and way of storing. Weights come from memory."""
    for shape in shapes:
        copies = max(1, _COPIES_BYTES // (shape[0] * shape[1] * 2)) if device.type == "cuda" else 1
        weights = [_normal(device, *shape) for _ in range(copies)]
        for num_rows in rows:
            x = _normal(device, num_rows, shape[1])
            own = _in_turns([partial(functional.linear, x, weight) for weight in weights], seconds_of)
            for way in ways:
                yield _product(card, way, shape, x, copies, own, seconds_of)


def measure_experts(
    card: Card,
    device: torch.device,
    layers: Sequence[Layer] = LAYERS,
    tokens: Sequence[int] = _TOKENS,
    ways: Sequence[Way] = OF_EXPERTS,
    seconds_of: Seconds = kernel_s,
) -> Iterator[Record]:
    """Yields a record for each layer, number of tokens and way of storing; experts are drawn evenly."""
    for layer in layers:
        num, hidden, width = layer.choice.num_experts, layer.hidden, layer.width
        stacks = ExpertStacks(_normal(device, num, 2 * width, hidden), _normal(device, num, hidden, width))
        coded = {way: _coded_experts(way, layer, device) for way in ways}
        for num_tokens in tokens:
            x, chosen = _normal(device, num_tokens, hidden), _drawn(device, num_tokens, layer.choice)
            shares = torch.ones(chosen.shape, device=device)
            own = seconds_of(partial(grouped_mlp, x, chosen, shares, stacks))
            read = len(chosen.unique()) * 3 * hidden * width
            for way, experts in coded.items():
                taken = seconds_of(partial(experts, x, (chosen, shares), None, None))
                flops = 2 * chosen.numel() * 3 * hidden * width
                num_bytes = read * _bytes_of_number(way, hidden)
                yield {"layer": layer.name, "tokens": num_tokens, **_rates(card, way, taken, own, num_bytes, flops)}


def _product(
    card: Card, way: Way, shape: tuple[int, int], x: Tensor, copies: int, own: float, seconds_of: Seconds
) -> Record:
    packed = [pack(_random(way, *shape, x.device)) for _ in range(copies)]
    products = [CodedProduct([one], None) for one in packed if one is not None]
    assert len(products) == copies, way.name
    taken = _in_turns([partial(product, x) for product in products], seconds_of)
    num_bytes = shape[0] * shape[1] * _bytes_of_number(way, shape[1])
    rates = _rates(card, way, taken, own, num_bytes, 2 * len(x) * shape[0] * shape[1])
    return {"out x in": f"{shape[0]} x {shape[1]}", "rows": len(x), **rates}


def _rates(card: Card, way: Way, taken: float, own: float, num_bytes: float, flops: float) -> Record:
    return {
        "stored": way.name,
        "us": taken * 1e6,
        "bfloat16_us": own * 1e6,
        "times_bfloat16": own / taken,
        "of_copy_bandwidth": num_bytes / taken / card.bytes_per_s,
        "of_matrix_rate": flops / taken / card.flops_per_s,
    }


def _in_turns(bodies: Sequence[Callable[[], object]], seconds_of: Seconds) -> float:
    """Returns the seconds of one of some bodies, which run one after the other."""

    def run() -> None:
        for body in bodies:
            body()

    return seconds_of(run) / len(bodies)


def _bytes_of_number(way: Way, depth: int) -> float:
    """Returns the bytes of a number of a weight, with its share of scales and offsets in float16."""
    return way.code.bits / 8 + 2 * (2 if way.has_offsets else 1) / (way.group or depth)


def _random(way: Way, out: int, depth: int, device: torch.device) -> CodedMatrix:
    codes = torch.randint(0, 1 << way.code.bits, (out, depth), dtype=torch.uint8, device=device)
    if way.code is Code.E4M3:
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    group = way.group or depth
    scales = torch.rand(out, -(-depth // group), device=device).to(torch.float16) / 64
    offsets = None
    if way.code is Code.UINT4:  # GGUF's Q4_0 has the first, AWQ zero points
        offsets = torch.rand_like(scales) / -16 if way.has_offsets else scales * -8
    return CodedMatrix(way.code, codes, scales, offsets, group, None, way.inputs)


def _coded_experts(way: Way, layer: Layer, device: torch.device) -> CodedExperts:
    experts = CodedExperts(layer.choice, None)
    for expert in range(layer.choice.num_experts):
        gate_up = _random(way, 2 * layer.width, layer.hidden, device)
        experts.put_codes(expert, gate_up, _random(way, layer.hidden, layer.width, device), None, None)
    return experts


def _drawn(device: torch.device, num_tokens: int, choice: RoutingNumbers) -> Tensor:
    scores = torch.rand(num_tokens, choice.num_experts, device=device)
    return scores.topk(choice.top_k).indices.to(torch.int32)


def _normal(device: torch.device, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
