"""What the instructions of AMX do, as kernels call them."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from services.engine.kernels.cpu.amx import tiles as amx
from tests.machine import AMX, needs


@cache
def make_multiply() -> Any:
    """Arguments: addresses of a configuration, of the left tile, of the right one; bytes from row to row of the left
    one; addresses of sums, to which the product is added, of two places for twice the product, the second with gaps
    between its rows, and of 64 bytes.
    """
    load_5, load_6, load_7, stream_6 = *amx.load[5:], amx.stream[6]
    zero_5, store_5, add_7_6_to_5 = amx.zero[5], amx.store[5], amx.add_product(5, 7, 6)

    def multiply(
        config: int, left: int, right: int, left_stride: int, sums: int, twice: int, apart: int, saved: int
    ) -> None:
        amx.save_config(saved)
        amx.load_config(config)
        load_7(left, left_stride)
        load_6(right, 64)
        load_5(sums, 64)
        add_7_6_to_5()
        store_5(sums, 64)
        zero_5()
        stream_6(right, 64)
        add_7_6_to_5()
        add_7_6_to_5()
        store_5(twice, 64)
        store_5(apart, 128)
        amx.load_config(saved)

    return njit(multiply)


def in_pairs(right: torch.Tensor) -> torch.Tensor:
    """[32, columns] -> [16, columns, 2]"""
    return right.view(16, 2, -1).transpose(1, 2).contiguous()


def run(rows: int, left: torch.Tensor, right: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds a product of so many rows to sums. Returns twice the product, and the same in every second row; else -1."""
    config, saved, pairs = amx.tile_config(), np.zeros(64, np.uint8), in_pairs(right)
    config[[48 + 5, 48 + 7]] = rows
    twice, apart = torch.full((16, 16), -1.0), torch.full((32, 16), -1.0)
    make_multiply()(
        config.ctypes.data,
        left.data_ptr(),
        pairs.data_ptr(),
        left.stride(0) * left.itemsize,
        sums.data_ptr(),
        twice.data_ptr(),
        apart.data_ptr(),
        saved.ctypes.data,
    )
    return twice, apart


@cache
def make_multiply_bytes() -> Any:
    """Arguments: addresses of a configuration, of the left tile, of the right one, of sums, to which the product is
    added twice, and of 64 bytes.
    """
    load_5, load_6, load_7 = amx.load[5:]
    store_5, add_7_6_to_5 = amx.store[5], amx.add_product_of_bytes(5, 7, 6)

    def multiply(config: int, left: int, right: int, sums: int, saved: int) -> None:
        amx.save_config(saved)
        amx.load_config(config)
        load_7(left, 64)
        load_6(right, 64)
        load_5(sums, 64)
        add_7_6_to_5()
        add_7_6_to_5()
        store_5(sums, 64)
        amx.load_config(saved)

    return njit(multiply)


def small_integers(*shape: int) -> torch.Tensor:
    """All sums of whose products are exact."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(sum(shape))).to(torch.bfloat16)


@needs(AMX)
@pytest.mark.parametrize("rows", [16, 5])
def test_a_product_of_tiles(rows: int) -> None:
    """Rows that are not configured are neither read nor written."""
    left, right, sums = small_integers(16, 96)[:, 32:64], small_integers(32, 16), small_integers(16, 16).float()
    before, product = sums.clone(), left.float() @ right.float()
    twice, apart = run(rows, left, right, sums)
    assert torch.equal(sums[:rows], before[:rows] + product[:rows])
    assert torch.equal(twice[:rows], 2 * product[:rows])
    assert torch.equal(apart[: 2 * rows : 2], 2 * product[:rows])
    assert torch.equal(sums[rows:], before[rows:])
    assert (twice[rows:] == -1).all()
    assert (apart[1::2] == -1).all()
    assert (apart[2 * rows :] == -1).all()


@needs(AMX)
def test_denormals_are_zero() -> None:
    """In what is multiplied, and in sums."""
    left, right = torch.full((16, 32), 1e-39).bfloat16(), torch.full((32, 16), 1e38).bfloat16()
    sums = torch.full((16, 16), 1e-39)
    twice, _ = run(16, left, right, sums)
    assert (sums == 0).all()
    assert (twice == 0).all()


@needs(AMX)
def test_a_product_of_bytes() -> None:
    """Unsigned ones by signed ones, and sums that wrap around."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randint(0, 256, (16, 64), dtype=torch.uint8, generator=generator)
    right = torch.randint(-128, 128, (64, 16), dtype=torch.int8, generator=generator)
    left[0], right[:, 0] = 255, -128
    sums = torch.full((16, 16), -(2**31), dtype=torch.int32)
    expected = (sums.long() + 2 * left.long() @ right.long() + 2**31) % 2**32 - 2**31
    in_fours = right.view(16, 4, 16).transpose(1, 2).contiguous()
    config, saved = amx.tile_config(), np.zeros(64, np.uint8)
    addresses = left.data_ptr(), in_fours.data_ptr(), sums.data_ptr(), saved.ctypes.data
    make_multiply_bytes()(config.ctypes.data, *addresses)
    assert torch.equal(sums.long(), expected)
