"""Rows of a matrix of codes in panels, in numbers: those of an embedding whose panels an output layer multiplies."""

from functools import cache
from typing import Any

import torch
from numba import float32, int8, uint32
from torch import Tensor

from services.engine.kernels.cpu.coded_panels import CodedPanels, step_bytes, step_depth
from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.intrinsics import (
    bits_float,
    byte_pointer,
    float_of_half,
    float_pointer,
    half_pointer,
    int_pointer,
    long_pointer,
    njit,
    word_pointer,
)
from services.engine.kernels.cpu.per_item import per_item, places
from services.engine.kernels.cpu.register_tiles import COLUMNS
from services.engine.kernels.cpu.scale_forms import ScaleForm
from services.engine.kernels.cpu.team import Kernel, the_team
from services.engine.quantization.codes import Code


def decoded_rows(panels: CodedPanels, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns rows of the matrix, [T, depth], as `CodedMatrix.numbers` has them. ids: int64[T], below its columns."""
    rows = torch.empty(len(ids), panels.depth, dtype=dtype)
    ids = ids.contiguous()
    the_team().run(
        _kernel(str(dtype).removeprefix("torch."), panels.scales, panels.code, has_offsets=panels.has_offsets),
        len(ids),
        ids.data_ptr(),
        rows.data_ptr(),
        panels.memory.data_ptr(),
        panels.panel_bytes,
        panels.depth,
        panels.group_steps,
        panels.table.data_ptr(),
        0 if panels.order is None else panels.order.data_ptr(),
    )
    return rows


@cache
def _kernel(dtype: str, scales: ScaleForm, code: Code, *, has_offsets: bool) -> Kernel:
    return make_decode_rows(dtype, scales, code, has_offsets=has_offsets)


@per_item
def make_decode_rows(dtype: str, scales: ScaleForm, code: Code, *, has_offsets: bool) -> Any:
    """Makes the kernel that decodes a row in each item.

    Arguments of the kernel: ids, int64; rows, [T, depth]; panels, and bytes from one to the next; depth; steps of a
    group; table of the codes' numbers, float32; order, int32, or 0.
    """
    arg = places("ids rows weight panel_bytes depth group_steps table order")
    element, read = ELEMENTS[dtype], _READERS[scales]
    of_step, code_bytes, bits = step_depth(code), step_bytes(code), code.bits
    of_block, of_group = scales.block_groups, scales.tail_bytes(has_offsets=False)
    head, tail = scales.head_bytes(has_offsets=has_offsets), scales.tail_bytes(has_offsets=has_offsets)
    size, pointer, write = element.size, element.pointer, element.store

    @njit
    def code_at(step: int, depth: int, lane: int) -> int:
        if bits == 8:
            return int(byte_pointer(step)[depth * COLUMNS + lane])
        pair, half = depth // 2, depth % 2
        low = (word_pointer(step)[pair // 4 * COLUMNS + lane] >> uint32(4 * (pair % 4) + 16 * half)) & uint32(15)
        if bits == 4:
            return int(low)
        high = word_pointer(step)[of_step // 8 * COLUMNS + lane] >> uint32((bits - 4) * pair + 16 * half)
        return int(low | (high & uint32((1 << (bits - 4)) - 1)) << uint32(4))

    def work(a: Any, item: int, _thread: int) -> None:
        row = long_pointer(a[arg.ids])[item]
        lane, depth, group = row % COLUMNS, a[arg.depth], a[arg.group_steps] * of_step
        table, target = float_pointer(a[arg.table]), pointer(a[arg.rows] + item * depth * size)
        codes = a[arg.weight] + row // COLUMNS * a[arg.panel_bytes]
        block = codes
        for begin in range(0, depth, group):
            end = min(begin + group, depth)
            if begin // group % of_block == 0:
                block = codes
                codes += head
            at_scales = codes + (end - begin + of_step - 1) // of_step * code_bytes
            scale = read(at_scales, block, lane)
            offset = read(at_scales + of_group, block + COLUMNS * 2, lane) if has_offsets else 0.0
            for i in range(begin, end):
                step, rest = (i - begin) // of_step, (i - begin) % of_step
                number = table[code_at(codes + step * code_bytes, rest, lane)] * scale
                if has_offsets:
                    number += offset
                write(target, int_pointer(a[arg.order])[i] if a[arg.order] != 0 else i, number)
            codes = at_scales + tail

    return njit(work)


@njit
def _read_float32(address: int, _block: int, lane: int) -> float:
    return float_pointer(address)[lane]


@njit
def _read_float16(address: int, _block: int, lane: int) -> float:
    return float_of_half(half_pointer(address)[lane])


@njit
def _read_bfloat16(address: int, _block: int, lane: int) -> float:
    return bits_float(uint32(half_pointer(address)[lane]) << uint32(16))


@njit
def _read_uint8(address: int, block: int, lane: int) -> float:
    return float_of_half(half_pointer(block)[lane]) * float32(byte_pointer(address)[lane])


@njit
def _read_int8(address: int, block: int, lane: int) -> float:
    return float_of_half(half_pointer(block)[lane]) * float32(int8(byte_pointer(address)[lane]))


_READERS = {
    ScaleForm.FLOAT32: _read_float32,
    ScaleForm.FLOAT16: _read_float16,
    ScaleForm.BFLOAT16: _read_bfloat16,
    ScaleForm.UINT8_BY_8: _read_uint8,
    ScaleForm.INT8_BY_16: _read_int8,
}
