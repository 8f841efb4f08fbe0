"""Rotation and KV write, against float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.kernels.gpu import rotary
from tests.gpu.checks.buffers import POISON, Buffer, within
from tests.gpu.checks.errors import BOUNDS, NEAREST, compare, exactly, float8_steps, relative_error
from tests.gpu.checks.result import Check
from tests.gpu.checks.source import DTYPES, Source, cases

_HEAD_DIMS = (16, 64, 80, 96, 128, 256)
_GROUPS = (1, 2, 3, 4, 7, 8, 16)
_EPS = 1e-6
_FLOAT8 = torch.float8_e4m3fn
_NUM_LAYERS = 3


def check(device: torch.device, seed: int, num_cases: int) -> list[Check]:
    """Checks `num_cases` random cases of each kernel."""
    return [
        found
        for kernel in (check_rotate, check_rotate_and_store, check_store_kv)
        for found in kernel(device, seed, num_cases)
    ]


def check_rotate(device: torch.device, seed: int, num_cases: int) -> list[Check]:
    """Checks the rotation of some of the heads, in place."""
    return cases(_rotate, device, seed, num_cases)


def check_rotate_and_store(device: torch.device, seed: int, num_cases: int) -> list[Check]:
    """Checks the rotation of Q in place, and of K to a pool, with V."""
    return cases(_rotate_and_store, device, seed, num_cases)


def check_store_kv(device: torch.device, seed: int, num_cases: int) -> list[Check]:
    """Checks the store of K and V to a pool, without rotation."""
    return cases(_store_kv, device, seed, num_cases)


@dataclass(frozen=True, slots=True, eq=False)
class _Rotation:
    """The rotation of some tokens, and the norm before it."""

    cos: Tensor
    signed_sin: Tensor
    weight: Tensor | None

    def apply(self, heads: Tensor) -> Tensor:
        """Rotates heads [T, n, head_dim] in float64."""
        wide = heads.double()
        if self.weight is not None:
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS) * self.weight.double()
        turned, rest = wide.tensor_split((self.cos.shape[-1],), dim=-1)
        swapped = turned.roll(turned.shape[-1] // 2, -1)
        return torch.cat((turned * self.cos.double() + swapped * self.signed_sin.double(), rest), dim=-1)


class _Pool:
    """A pool that is poison all over, and where some tokens' KV goes in it; the second of them is a padded one."""

    def __init__(self, source: Source, num_tokens: int, num_kv: int, head_dim: int, dtype: torch.dtype) -> None:
        choices, device = source.choices, source.device
        block_size = choices.choice((8, 16, 64))
        num_blocks = num_tokens // block_size + 2
        self._buffer = Buffer((num_blocks, num_kv, _NUM_LAYERS, 2, block_size, head_dim), dtype, device)
        scales = None
        if dtype == _FLOAT8:
            scales = within((0.001 + torch.rand(_NUM_LAYERS, 2, num_kv, generator=source.generator)).to(device) / 20)
        self.paged = rotary.PagedKv(self._buffer.tensor, scales)
        self.layer = choices.randrange(_NUM_LAYERS)
        self._positions = choices.sample(range(num_blocks * block_size), num_tokens)
        stride = self._buffer.tensor.stride(0)
        offsets = [at // block_size * stride + at % block_size * head_dim for at in self._positions]
        offsets[1:2] = [-1] * len(offsets[1:2])
        self.offsets = within(torch.tensor(offsets, dtype=torch.int64, device=device))

    def check(self, name: str, k: Tensor, v: Tensor, dtype: torch.dtype) -> list[Check]:
        """Checks that the pool holds these, [T, num_kv, head_dim], and nothing else. dtype: of the operands."""
        pool, is_stored = self._buffer.tensor, self.offsets >= 0
        positions = torch.tensor(self._positions, device=pool.device)[is_stored]
        block, inside = positions // pool.shape[4], positions % pool.shape[4]
        as_bytes = pool.view(torch.uint8)
        found = []
        for plane, (kind, values) in enumerate((("K", k), ("V", v))):
            out = as_bytes[block, :, self.layer, plane, inside].view(pool.dtype)
            found.append(self._compare(f"{name}: {kind}", plane, out, values[is_stored], dtype))
            as_bytes[block, :, self.layer, plane, inside] = POISON
        is_poison = bool((as_bytes == POISON).all())
        return [*found, exactly(f"{name}: wrote nothing else to the pool", is_poison and self._buffer.is_clean())]

    def _compare(self, name: str, plane: int, out: Tensor, values: Tensor, dtype: torch.dtype) -> Check:
        if self.paged.scales is None:
            return compare(name, out, values, dtype)
        scaled = values.double() / self.paged.scales[self.layer, plane, :, None].double()
        if plane == 1 or dtype == torch.float32:
            return float8_steps(name, out, scaled, NEAREST)
        # A small difference of large products is many of its own steps away where the products were rounded.
        return Check(name, relative_error(out, scaled.clamp(-448, 448)), 2**-4 + BOUNDS[dtype])


def _rotation(source: Source, num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> _Rotation:
    turned = source.choices.choice((head_dim, head_dim, head_dim * 3 // 4, 2))
    cos, signed_sin = (within(source.normal(num_tokens, 1, turned, dtype=dtype)) for _ in range(2))
    weight = within(source.normal(num_heads, head_dim, dtype=dtype)) if source.choices.random() < 0.5 else None
    return _Rotation(cos, signed_sin, weight)


def _heads(source: Source, values: Tensor) -> Buffer:
    """Makes a Buffer with these values; tokens lie apart or next to each other."""
    gap = source.choices.choice((0, 8, 40))
    buffer = Buffer(tuple(values.shape), values.dtype, values.device, values[0].numel() + gap)
    buffer.tensor.copy_(values)
    return buffer


def _rotate(source: Source, name: str) -> list[Check]:
    dtype, head_dim = source.choices.choice(DTYPES), source.choices.choice(_HEAD_DIMS)
    num_tokens, num_heads, num_rotated = source.num_rows(), source.choices.randint(2, 40), source.choices.randint(1, 40)
    num_rotated = min(num_rotated, num_heads)
    values = source.normal(num_tokens, num_heads, head_dim, dtype=dtype)
    rotation = _rotation(source, num_tokens, num_rotated, head_dim, dtype)
    heads = _heads(source, values)
    rotary.rotate(heads.tensor[:, :num_rotated], rotation.cos, rotation.signed_sin, rotation.weight, _EPS)
    name = f"rotate {num_rotated} of {list(values.shape)} {dtype} {name}"
    return [
        compare(name, heads.tensor[:, :num_rotated], rotation.apply(values[:, :num_rotated]), dtype),
        exactly(f"{name}: left the others", torch.equal(heads.tensor[:, num_rotated:], values[:, num_rotated:])),
        exactly(f"{name}: wrote nothing else", heads.is_clean()),
    ]


def _rotate_and_store(source: Source, name: str) -> list[Check]:
    dtype, head_dim, num_tokens = source.choices.choice(DTYPES), source.choices.choice(_HEAD_DIMS), source.num_rows()
    num_kv = source.choices.choice((1, 2, 4, 8))
    num_q = num_kv * source.choices.choice(_GROUPS)
    pool = _Pool(source, num_tokens, num_kv, head_dim, source.choices.choice((dtype, _FLOAT8)))
    values = source.normal(num_tokens, num_q + 2 * num_kv, head_dim, dtype=dtype)
    rotation = _rotation(source, num_tokens, num_q + num_kv, head_dim, dtype)
    heads = _heads(source, values)
    rotary.rotate_and_store(
        heads.tensor,
        (rotation.cos, rotation.signed_sin),
        rotation.weight,
        _EPS,
        kv=pool.paged,
        layer=pool.layer,
        offsets=pool.offsets,
    )
    turned = rotation.apply(values[:, : num_q + num_kv])
    name = f"rotate_and_store {num_q} + 2 * {num_kv} x {head_dim} {dtype} {pool.paged.pool.dtype} {name}"
    return [
        compare(f"{name}: Q", heads.tensor[:, :num_q], turned[:, :num_q], dtype),
        exactly(f"{name}: left K and V", torch.equal(heads.tensor[:, num_q:], values[:, num_q:])),
        exactly(f"{name}: wrote nothing else to the heads", heads.is_clean()),
        *pool.check(name, turned[:, num_q:], values[:, num_q + num_kv :], dtype),
    ]


def _store_kv(source: Source, name: str) -> list[Check]:
    dtype, head_dim, num_tokens = source.choices.choice(DTYPES), source.choices.choice(_HEAD_DIMS), source.num_rows()
    num_kv = source.choices.choice((1, 2, 5, 12, 40))
    pool = _Pool(source, num_tokens, num_kv, head_dim, source.choices.choice((dtype, _FLOAT8)))
    qkv = within(source.normal(num_tokens, 3, num_kv, head_dim, dtype=dtype))
    rotary.store_kv(qkv[:, 1], qkv[:, 2], kv=pool.paged, layer=pool.layer, offsets=pool.offsets)
    name = f"store_kv {num_kv} x {head_dim} {dtype} {pool.paged.pool.dtype} {name}"
    return pool.check(name, qkv[:, 1], qkv[:, 2], torch.float32)
