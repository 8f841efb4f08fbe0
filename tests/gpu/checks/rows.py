"""Norms, activation, quantisation and the tokens that a step begins with, against float64."""

import torch

from services.engine.kernels.gpu import rows
from tests.gpu.checks.buffers import Buffer, within
from tests.gpu.checks.errors import NEAREST, compare, exactly, float8_steps
from tests.gpu.checks.result import Check
from tests.gpu.checks.source import DTYPES, Source, cases

_WIDTHS = (1, 7, 48, 64, 100, 300, 576, 768, 1000, 1536, 4096, 5120, 14336, 16384)
_EPS = 1e-5


def check(device: torch.device, seed: int, num_cases: int) -> list[Check]:
    """Checks `num_cases` random cases of each kernel."""
    return [
        found
        for kernel in (check_norm, check_add_normed, check_silu_mul, check_quantize, check_fill_tokens)
        for found in kernel(device, seed, num_cases)
    ]


def check_norm(device: torch.device, seed: int, num_cases: int) -> list[Check]:
    """Checks RMSNorm, with and without an addition before it."""
    return cases(_norm, device, seed, num_cases)


def check_add_normed(device: torch.device, seed: int, num_cases: int) -> list[Check]:
    """Checks RMSNorms that are added to other rows, or written in place."""
    return cases(_add_normed, device, seed, num_cases)


def check_silu_mul(device: torch.device, seed: int, num_cases: int) -> list[Check]:
    """Checks SiLU(gate) * up."""
    return cases(_silu_mul, device, seed, num_cases)


def check_quantize(device: torch.device, seed: int, num_cases: int) -> list[Check]:
    """Checks rows as float8_e4m3fn, each with a scale."""
    return cases(_quantize, device, seed, num_cases)


def check_fill_tokens(device: torch.device, seed: int, num_cases: int) -> list[Check]:
    """Checks the tokens that the step before sampled."""
    return cases(_fill_tokens, device, seed, num_cases)


def _norm(source: Source, name: str) -> list[Check]:
    dtype, width, num_rows = source.choices.choice(DTYPES), source.choices.choice(_WIDTHS), source.num_rows()
    values, weight = source.normal(num_rows, width, dtype=dtype), within(source.normal(width, dtype=dtype))
    x, out = Buffer((num_rows, width), dtype, source.device), Buffer((num_rows, width), dtype, source.device)
    x.tensor.copy_(values)
    y = None
    if source.choices.random() < 0.7:
        y = within(source.normal(num_rows, width, dtype=dtype), width + source.choices.choice((0, 3, 64)))
    factor = source.choices.choice((1.0, 0.22))
    rows.norm_into(x.tensor, y, weight, _EPS, out.tensor, factor)

    added = values if y is None else (values.double() + (y.double() * factor).to(dtype).double()).to(dtype)
    wide = added.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS) * weight.double()
    name = f"{'norm' if y is None else f'add_norm times {factor}'} {list(values.shape)} {dtype} {name}"
    return [
        compare(name, out.tensor, normed, dtype),
        compare(f"{name}: x", x.tensor, added, dtype),
        exactly(f"{name}: wrote nothing else", x.is_clean() and out.is_clean()),
    ]


def _add_normed(source: Source, name: str) -> list[Check]:
    dtype, width, num_rows = source.choices.choice(DTYPES), source.choices.choice(_WIDTHS), source.num_rows()
    values, weight = source.normal(num_rows, width, dtype=dtype), within(source.normal(width, dtype=torch.float32))
    y = Buffer((num_rows, width), dtype, source.device, width + source.choices.choice((0, 3, 64)))
    y.tensor.copy_(values)
    wide = values.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS) * weight.double()
    name = f"{list(values.shape)} {dtype} {name}"
    if source.choices.random() < 0.5:
        rows.add_normed(None, y.tensor, weight, _EPS)
        return [
            compare(f"norm in place {name}", y.tensor, normed, dtype),
            exactly(f"norm in place {name}: wrote nothing else", y.is_clean()),
        ]
    before = source.normal(num_rows, width, dtype=dtype)
    x = Buffer((num_rows, width), dtype, source.device)
    x.tensor.copy_(before)
    rows.add_normed(x.tensor, y.tensor, weight, _EPS)
    return [
        compare(f"add_normed {name}", x.tensor, before.double() + normed, dtype),
        exactly(f"add_normed {name}: left y", torch.equal(y.tensor, values) and y.is_clean()),
        exactly(f"add_normed {name}: wrote nothing else", x.is_clean()),
    ]


def _silu_mul(source: Source, name: str) -> list[Check]:
    dtype, width, num_rows = source.choices.choice(DTYPES), source.choices.choice(_WIDTHS), source.num_rows()
    gate_up = within(4 * source.normal(num_rows, 2 * width, dtype=dtype), 2 * width + source.choices.choice((0, 5, 64)))
    out = Buffer((num_rows, width), dtype, source.device)
    rows.gated_into(gate_up, out.tensor, gelu=False)
    gate, up = gate_up.double().chunk(2, dim=-1)
    name = f"silu_mul {list(out.tensor.shape)} {dtype} {name}"
    return [
        compare(name, out.tensor, gate * torch.sigmoid(gate) * up, dtype),
        exactly(f"{name}: wrote nothing else", out.is_clean()),
    ]


def _quantize(source: Source, name: str) -> list[Check]:
    dtype, width, num_rows = source.choices.choice(DTYPES), source.choices.choice(_WIDTHS), source.num_rows()
    sizes = (
        torch.logspace(-3, 3, num_rows, device=source.device)[:, None]
        * (torch.arange(num_rows, device=source.device) != 1)[:, None].float()
    )  # the second row is 0
    x = within((source.normal(num_rows, width, dtype=torch.float32) * sizes).to(dtype), width + 16)
    out = Buffer((num_rows, width), torch.float8_e4m3fn, source.device)
    scales = Buffer((num_rows, 1), torch.float32, source.device)
    rows.quantize_rows_into(x, out.tensor, scales.tensor)
    expected = x.double().abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 448
    name = f"quantize_rows {list(x.shape)} {dtype} {name}"
    return [
        compare(f"{name}: scales", scales.tensor, expected, torch.float32),
        float8_steps(name, out.tensor, x.double() / expected, NEAREST),
        exactly(f"{name}: wrote nothing else", out.is_clean() and scales.is_clean()),
    ]


def _fill_tokens(source: Source, name: str) -> list[Check]:
    count, num_previous = source.choices.choice((1, 3, 255, 256, 700)), source.choices.choice((1, 5, 300))
    previous = [source.choices.randrange(200_000) for _ in range(num_previous)]
    ids = [
        source.choices.choice((source.choices.randrange(200_000), 0, -1, -1 - source.choices.randrange(num_previous)))
        for _ in range(count)
    ]
    out = Buffer((count,), torch.int64, source.device)
    rows.fill_tokens_into(
        within(torch.tensor(ids, dtype=torch.int32, device=source.device)),
        within(torch.tensor(previous, dtype=torch.int32, device=source.device)),
        out.tensor,
    )
    expected = [token if token >= 0 else previous[-1 - token] for token in ids]
    name = f"fill_tokens {count} {name}"
    return [
        exactly(name, out.tensor.tolist() == expected),
        exactly(f"{name}: wrote nothing else", out.is_clean()),
    ]
