"""The parts of `python -m loadtest gpu`, in the order in which they run: those that decide, then the others.

Packages that a part needs beside torch, triton and numpy are imported when it runs; where one is missing, the part is
left out with a note that names it:

    compile, card, decode, prefill, cascade    safetensors
    check                                      nothing else
    coded, experts, latents                    nothing else
    handoff, interference                      safetensors, psutil, structlog, orjson, redis, grpcio,
                                               grpcio-health-checking, protobuf (7.35 or later); nixl, without which KV
                                               moves over gRPC and the records say so
    peer                                       safetensors, transformers

Seconds on an H200: compile 17, check 47, card 3, decode 5, prefill 2, cascade 1, handoff 39, interference 45, peer 19,
decode and prefill of the other shapes 7.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from loadtest.gpu.part_process import Found, Piece
from loadtest.gpu.shapes import SHAPES

if TYPE_CHECKING:
    from loadtest.gpu.bench import Bench

LARGE, *OTHERS = SHAPES
_CHECKED_S, _INTERPRETED_S = 40.0, 5.0  # rounds of checks begin within this time; one round takes some seconds
_CODED = ((4096, 4096), (28672, 4096))  # [out, in] of products: Llama 3 8B's o, and its gate and up
_KV_DTYPES = ("bfloat16", "float8_e4m3fn")
_SEEDS = range(0, 4000, 1000)  # for attention, which has the most variants to be compiled


@dataclass(frozen=True, slots=True)
class Part:
    """The pieces of one table; a piece that fails does not keep the others from running."""

    about: str
    pieces: tuple[Piece, ...]
    at_once: bool = False  # the pieces may run beside each other: none is timed
    limit_s: float = 150.0  # of each piece


def _compile(name: str, kv_dtype: str, bench: "Bench") -> Iterator[Found]:
    import torch

    from loadtest.gpu import warm_up

    yield from warm_up.measure(bench.model(name), getattr(torch, kv_dtype))


def _check(family: str, seed: int, bench: "Bench") -> Iterator[Found]:
    from loadtest.gpu import correctness

    device = bench.device.torch
    seconds = _CHECKED_S if device.type == "cuda" else _INTERPRETED_S
    yield from correctness.measure(family, device, bench.seed * 100_000 + seed, seconds)


def _card(bench: "Bench") -> Iterator[Found]:
    card = bench.card
    yield {
        "card": card.name,
        "multiprocessors": card.num_multiprocessors,
        "memory_gib": card.total_bytes / 2**30,
        "copy_gb_per_s": card.bytes_per_s / 1e9,
        "bf16_tflops": card.flops_per_s / 1e12,
    }


def _decode(name: str, bench: "Bench") -> Iterator[Found]:
    from loadtest.gpu import decode

    yield from decode.measure(bench.model(name), bench.card)


def _prefill(name: str, bench: "Bench") -> Iterator[Found]:
    from loadtest.gpu import prefill

    yield from prefill.measure(bench.model(name), bench.card)


def _cascade(bench: "Bench") -> Iterator[Found]:
    from loadtest.gpu import cascade

    yield from cascade.measure(bench.model(LARGE))


def _coded(shape: tuple[int, int], bench: "Bench") -> Iterator[Found]:
    from loadtest.gpu import coded

    bench.free_model()
    yield from coded.measure(bench.card, bench.device.torch, [shape])


def _coded_experts(bench: "Bench") -> Iterator[Found]:
    from loadtest.gpu import coded

    bench.free_model()
    yield from coded.measure_experts(bench.card, bench.device.torch)


def _experts(bench: "Bench") -> Iterator[Found]:
    from loadtest.gpu import experts

    bench.free_model()
    yield from experts.measure(bench.card, bench.device.torch)


def _latents(bench: "Bench") -> Iterator[Found]:
    from loadtest.gpu import latents

    bench.free_model()
    yield from latents.measure(bench.card, bench.device)


def _handoff(bench: "Bench") -> Iterator[Found]:
    from loadtest.gpu import handoff

    bench.free_model()
    yield from handoff.measure()


def _interference(bench: "Bench") -> Iterator[Found]:
    from loadtest.gpu import interference

    bench.free_model()
    yield from interference.measure()


def _peer(bench: "Bench") -> Iterator[Found]:
    from loadtest.gpu import peer

    yield from peer.measure(bench.model(LARGE), SHAPES[LARGE])


_CHECKS = (
    *(
        partial(_check, family, 0)
        for family in ("rows", "rotary", "fp8_linear", "coded", "experts", "latents", "sampling")
    ),
    *(partial(_check, "attention", seed) for seed in _SEEDS),
)
_COMPILED = tuple(partial(_compile, name, kv_dtype) for name in SHAPES for kv_dtype in _KV_DTYPES)

PARTS = {
    "compile": Part("compiling the kernels and a first step of each kind, all at once", _COMPILED, at_once=True),
    "check": Part("every kernel against a reference, ‖out - reference‖ / ‖reference‖", _CHECKS, at_once=True),
    "card": Part("the card's copy bandwidth and matrix rate", (_card,)),
    "decode": Part("decode steps against the memory floor", (partial(_decode, LARGE),)),
    "prefill": Part("prompts against the matrix rate", (partial(_prefill, LARGE),)),
    "cascade": Part("decoding behind a shared prefix", (_cascade,)),
    "experts": Part("a layer's experts against the copy bandwidth and the matrix rate", (_experts,)),
    "latents": Part("a layer's attention over latents against the copy bandwidth and the matrix rate", (_latents,)),
    "handoff": Part("a handoff between two processes on one card", (_handoff,)),
    "interference": Part("streams while long prompts arrive, two processes on one card", (_interference,)),
    "peer": Part("transformers on the same card", (_peer,)),
    "decode-others": Part("decode steps of other shapes", tuple(partial(_decode, name) for name in OTHERS)),
    "prefill-others": Part("prompts of other shapes", tuple(partial(_prefill, name) for name in OTHERS)),
    "coded": Part(
        "products of weights as codes, beside cuBLAS in bfloat16",
        (*(partial(_coded, shape) for shape in _CODED),),
        limit_s=300.0,  # a kernel is compiled for each way of storing, shape and tile
    ),
    "coded-experts": Part("a layer's experts as codes, beside bfloat16", (_coded_experts,)),
}
