"""Products of linear layers, each kind in turn: so that a machine's other work meets them all.

Of each shape there are so many weights that a core's caches do not hold them. A product in int8 has the rows' own
rounding to int8 in its time. The shortest of the rounds counts.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loadtest.micro.model_parts import MeasuredStep
from loadtest.micro.packed_parts import STEPS, Numbers, by_turns
from loadtest.micro.peaks import copy_rate, peak_flops
from loadtest.tables import Record
from services.engine.kernels.cpu.int8_linear import Int8Linear
from services.engine.kernels.cpu.isa import known_isa
from services.engine.kernels.cpu.openmp import loaded_openmp
from services.engine.kernels.cpu.packed_linear import PackedLinear
from services.engine.models.architectures import parse_model_config
from services.engine.models.config import DecoderConfig
from services.engine.models.quantized.at_load import QuantizedAtLoad
from services.engine.models.registry import load_weights, open_tensors
from services.engine.models.weights import DecoderWeights
from services.engine.quantization.codes import Code, CodedMatrix, Inputs
from services.engine.quantization.rounding import to_int8
from services.engine.runner.memory import keep_freed_memory
from services.protocol.model_files.open import open_model

_SHAPES = ((576, 1536), (3072, 576), (4096, 4096))  # columns, depth: two of the demo model, and one of a model of 8B
_ROWS = (1, 16, 64, 256, 2048)
_WEIGHT_BYTES, _MOST_WEIGHTS = 64 << 20, 24  # in bfloat16
_OPERATIONS = 2e9  # of a round, at least
_CONTEXT = 120  # tokens of each sequence before a step that decodes
Layer = Callable[[Tensor], Tensor]


def measure(model: Path | None, threads: int, rounds: int, dtype: torch.dtype) -> list[Record]:
    """Returns the peak rates, a record for each product, then one for each step of the model.

    threads: 0 for one on each core.
    """
    keep_freed_memory()
    openmp = loaded_openmp()
    assert openmp is not None
    openmp.set_num_threads(threads or len(os.sched_getaffinity(0)))
    openmp.spin()
    name = str(dtype).removeprefix("torch.")
    records: list[Record] = [
        {
            "product": f"peaks, {known_isa().name}",
            f"{name}_gflops": peak_flops(name) / 1e9,
            "int8_gflops": peak_flops("int8") / 1e9,
            "copied_gb_per_s": copy_rate() / 1e9,
        }
    ]
    with torch.inference_mode():
        for columns, depth in _SHAPES:
            kinds = _layers(columns, depth, dtype)
            records += [_record(kinds, columns, torch.randn(rows, depth).to(dtype), rounds) for rows in _ROWS]
        if model is not None:
            records += _steps(model, dtype)
    return records


def _steps(model: Path, dtype: torch.dtype) -> list[Record]:
    """Measures steps of a model in numbers, in turns with those of the same that is rounded to int8 when it is read."""
    config = parse_model_config(open_model(model).config())
    if not isinstance(config, DecoderConfig):
        raise SystemExit(f"{config.architecture} is not measured here")
    with open_tensors(model, config, torch.device("cpu")) as source:
        numbers: Any = Numbers(source)
        both = [load_weights(each, config, dtype, fused=True) for each in (numbers, QuantizedAtLoad(numbers, to_int8))]
    records = []
    for rows, new in STEPS:
        steps = []
        for weights in both:
            assert isinstance(weights, DecoderWeights)
            steps.append(MeasuredStep(config, weights, rows, new, _CONTEXT))
        wide, narrow = by_turns(steps[0].whole, steps[1].whole)
        record: Record = {"step": f"{rows} x {new} tokens", "numbers_ms": wide * 1e3, "int8_ms": narrow * 1e3}
        records.append(record | {"ratio": wide / narrow})
    return records


def _layers(columns: int, depth: int, dtype: torch.dtype) -> dict[str, list[Layer]]:
    """Makes layers of the same weights, by kind."""
    count = max(1, min(_MOST_WEIGHTS, _WEIGHT_BYTES // (columns * depth * 2)))
    wide, narrow = list[Layer](), list[Layer]()
    for _ in range(count):
        weight = torch.randn(columns, depth)
        scales = weight.abs().amax(dim=1, keepdim=True) / 127
        codes = (weight / scales).round().to(torch.int8).view(torch.uint8)
        matrix = CodedMatrix(Code.INT8, codes, scales, None, depth, inputs=Inputs.INT8)
        narrow.append(Int8Linear([matrix], None, dtype))
        wide.append(PackedLinear(weight.to(dtype), None))
    return {str(dtype).removeprefix("torch."): wide, "int8": narrow}


def _record(kinds: dict[str, list[Layer]], columns: int, x: Tensor, rounds: int) -> Record:
    rows, depth = x.shape
    operations = 2 * rows * columns * depth
    times = dict.fromkeys(kinds, float("inf"))
    for _ in range(rounds):
        for kind, layers in kinds.items():
            times[kind] = min(times[kind], _seconds(layers, x, operations))
    record: Record = {"product": f"{columns} x {depth}", "rows": rows}
    for kind, took in times.items():
        record |= {f"{kind}_ms": took * 1e3, f"{kind}_gflops": operations / took / 1e9}
    wide, narrow = times.values()
    return record | {"ratio": wide / narrow}


def _seconds(layers: Sequence[Layer], x: Tensor, operations: int) -> float:
    """Returns the seconds of one product."""
    repeats = max(1, round(_OPERATIONS / operations / len(layers)))
    started = time.perf_counter()
    for _ in range(repeats):
        for layer in layers:
            layer(x)
    return (time.perf_counter() - started) / repeats / len(layers)
