"""Norms, activation, quantisation, rotation and KV write on Triton are what they are in float64."""

import pytest
import torch

from services.engine.kernels.gpu.rotary import PagedKv, store_kv
from tests.gpu.checks import rotary, rows

CHECKS = [
    (rows.check_norm, 10),
    (rows.check_add_normed, 6),
    (rows.check_silu_mul, 6),
    (rows.check_quantize, 6),
    (rows.check_fill_tokens, 10),
    (rotary.check_rotate, 6),
    (rotary.check_rotate_and_store, 8),
    (rotary.check_store_kv, 6),
]


@pytest.mark.few(4)
@pytest.mark.parametrize(("check", "num_cases"), CHECKS, ids=lambda value: getattr(value, "__name__", None))
def test_kernel_is_its_reference(device, check, num_cases):
    checks = check(device, seed=1, num_cases=num_cases)

    assert len(checks) >= num_cases
    assert [found for found in checks if not found.ok] == []


def test_a_pool_may_have_more_than_2_to_the_31_elements(device):
    """Of its memory only what is written is ever touched."""
    pool = torch.empty((300, 8, 32, 2, 64, 256), dtype=torch.float8_e4m3fn, device=device)
    k, v = torch.randint(-8, 9, (2, 1, 8, 256), generator=torch.Generator().manual_seed(0)).float().to(device)
    offsets = torch.tensor([299 * pool.stride(0) + 63 * 256], device=device)
    assert offsets.item() > 2**31

    store_kv(k, v, kv=PagedKv(pool, torch.ones(32, 2, 8, device=device)), layer=31, offsets=offsets)

    assert torch.equal(pool[299, :, 31, 0, 63].float(), k[0])
    assert torch.equal(pool[299, :, 31, 1, 63].float(), v[0])
