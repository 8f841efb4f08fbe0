"""Products with GGUF's weights of scales of two levels, each form in turn.

The simpler form has a float32 for each group's scale and offset, and codes of 4 or 8 bits. Of each there are so many
weights that a core's caches do not hold them. What counts is the least CPU time of the calling thread, which with one
thread is that of the product, and which other processes of the machine lengthen least.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loadtest.tables import Record
from services.engine.kernels.cpu.coded_linear import CodedLinear
from services.engine.kernels.cpu.coded_panels import pack_codes
from services.engine.kernels.cpu.isa import known_isa
from services.engine.kernels.cpu.matmul import WEIGHTS
from services.engine.kernels.cpu.openmp import loaded_openmp
from services.engine.quantization.codes import CoarseScales, Code, CodedMatrix

_SHAPES = ((3072, 576), (4096, 4096))  # columns, depth
_ROWS = (1, 4, 16, 64)
_WEIGHT_BYTES = 48 << 20


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    code: Code
    group: int
    block: int  # groups
    fine: torch.dtype
    has_offsets: bool


_KINDS = (
    _Kind("Q4_K", Code.UINT4, 32, 8, torch.uint8, has_offsets=True),
    _Kind("Q5_K", Code.UINT5, 32, 8, torch.uint8, has_offsets=True),
    _Kind("Q6_K", Code.INT6, 16, 16, torch.int8, has_offsets=False),
)


def measure(threads: int, rounds: int, dtype: torch.dtype) -> list[Record]:
    """Returns a record for each kind, shape and number of rows. threads: 0 for one on each core."""
    openmp = loaded_openmp()
    assert openmp is not None
    openmp.set_num_threads(threads or len(os.sched_getaffinity(0)))
    records = list[Record]()
    with torch.inference_mode():
        for kind in _KINDS:
            for columns, depth in _SHAPES:
                matrix = _random(kind, columns, depth)
                simple = matrix.with_one_level().with_simple_codes()
                forms = [_layers(each, dtype) for each in (matrix, simple)]
                for rows in _ROWS:
                    x = torch.randn(rows, depth).to(dtype)
                    own_s, simple_s = _by_turns(forms, x, rounds)
                    records.append(
                        {
                            "of": f"{known_isa().name}, {kind.name}, {columns} x {depth}, {rows} rows",
                            "bits": matrix.nbytes * 8 / matrix.codes.numel(),
                            "simple_bits": simple.nbytes * 8 / matrix.codes.numel(),
                            "us": own_s * 1e6,
                            "simple_us": simple_s * 1e6,
                            "times": simple_s / own_s,
                        }
                    )
    return records


def _by_turns(forms: Sequence[Sequence[CodedLinear]], x: Tensor, rounds: int) -> list[float]:
    """Returns the least time of a product of each form."""
    least = [float("inf")] * len(forms)
    for _ in range(rounds):
        for number, layers in enumerate(forms):
            started = time.thread_time()
            for layer in layers:
                layer(x)
            least[number] = min(least[number], (time.thread_time() - started) / len(layers))
    return least


def _layers(matrix: CodedMatrix, dtype: torch.dtype) -> list[CodedLinear]:
    """Returns layers whose panels are copies, each in memory of its own."""
    panels, layers = pack_codes(matrix), list[CodedLinear]()
    for _ in range(-(-_WEIGHT_BYTES // panels.memory.nbytes)):
        memory = WEIGHTS.empty(panels.memory.shape, torch.uint8)
        memory.copy_(panels.memory)
        layers.append(CodedLinear.of_panels(replace(panels, memory=memory), dtype))
    return layers


def _random(kind: _Kind, columns: int, depth: int) -> CodedMatrix:
    chance = torch.Generator().manual_seed(0)
    groups = columns, -(-depth // kind.group)
    blocks = columns, -(-groups[1] // kind.block)
    codes = torch.randint(1 << kind.code.bits, (columns, depth), generator=chance, dtype=torch.uint8)

    def fine() -> Tensor:
        return torch.randint(64, groups, generator=chance).to(kind.fine)

    def coarse() -> Tensor:
        return torch.rand(blocks, generator=chance).to(torch.float16)

    offsets, of_blocks = (fine(), coarse()) if kind.has_offsets else (None, None)
    both = CoarseScales(coarse(), of_blocks, kind.block)
    return CodedMatrix(kind.code, codes, fine(), offsets, kind.group, coarse=both)
