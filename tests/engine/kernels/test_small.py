"""The fused small operations are torch's, one by one."""

import pytest
import torch

from services.engine.kernels.load import make_operations

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("width", [16, 80, 768])
@pytest.mark.parametrize("dtype", DTYPES)
def test_they_compute_what_torch_computes(rows: int, width: int, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    fused, plain = make_operations(name, fused=True), make_operations(name, fused=False)
    exact = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.0, "rtol": 2**-7}
    weight = random(width, dtype=dtype)
    x, y = random(rows, width, dtype=dtype), random(rows + 1, width, dtype=dtype)[1:]
    torch.testing.assert_close(fused.norm(x, weight, EPS), plain.norm(x, weight, EPS), **exact)
    sums = x.clone(), x.clone()
    torch.testing.assert_close(
        fused.add_norm(sums[0], y, weight, EPS), plain.add_norm(sums[1], y, weight, EPS), **exact
    )
    assert torch.equal(*sums)
    sums = x.clone(), x.clone()
    torch.testing.assert_close(
        fused.add_norm(sums[0], y, weight, EPS, 0.22), plain.add_norm(sums[1], y, weight, EPS, 0.22), **exact
    )
    assert torch.equal(*sums)
    wide = 10 * random(rows, 2 * width, dtype=dtype)
    torch.testing.assert_close(fused.silu_mul(wide), plain.silu_mul(wide), **exact)
    torch.testing.assert_close(fused.gelu_mul(wide), plain.gelu_mul(wide), **(exact | {"atol": 1e-5}))
    apart, precise = wide[:, :width], 1 + random(width, dtype=torch.float32)
    torch.testing.assert_close(fused.norm(apart, precise, EPS), plain.norm(apart, precise, EPS), **exact)


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("width", [16, 80, 768])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_added_and_written_in_place(rows: int, width: int, dtype: torch.dtype) -> None:
    """What lies beside the rows stays."""
    name = str(dtype).removeprefix("torch.")
    exact = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2**-6, "rtol": 2**-7}
    weight, x = random(width, dtype=torch.float32), random(rows, width, dtype=dtype)
    wide = random(rows, width + 9, dtype=dtype)
    found = []
    for fused in (True, False):
        operations, sums, beside = make_operations(name, fused=fused), x.clone(), wide.clone()
        operations.add_normed(sums, beside[:, 4:-5], weight, EPS)
        assert torch.equal(beside, wide)
        operations.norm_in_place(beside[:, 4:-5], weight, EPS)
        assert torch.equal(beside[:, :4], wide[:, :4])
        assert torch.equal(beside[:, -5:], wide[:, -5:])
        found.append((sums, beside))
    for fused_one, plain_one in zip(*found, strict=True):
        torch.testing.assert_close(fused_one, plain_one, **exact)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (80, 80), (80, 60), (32, 2)])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_rotated_in_place(
    head_dim: int, rotary_dim: int, with_norm: bool, is_wide: bool, dtype: torch.dtype
) -> None:
    """Others are left alone, and so are the last numbers of a head that turns in part."""
    name = str(dtype).removeprefix("torch.")
    angles = random(7, 1, rotary_dim // 2, dtype=torch.float32)
    cos, sin = (torch.cat((x, x), -1).to(dtype) for x in (angles.cos(), angles.sin()))
    weight = random(5, head_dim, dtype=torch.float32 if is_wide else dtype) if with_norm else None
    heads = random(7, 8, head_dim, dtype=dtype)
    found, expected = heads.clone(), heads.clone()
    make_operations(name, fused=True).rotate(found[:, :5], cos, sin, weight, EPS)
    make_operations(name, fused=False).rotate(expected[:, :5], cos, sin, weight, EPS)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 2**-7}
    torch.testing.assert_close(found, expected, **tolerance)
    assert torch.equal(found[:, 5:], heads[:, 5:])
    assert with_norm or torch.equal(found[..., rotary_dim:], heads[..., rotary_dim:])


@pytest.mark.parametrize("vocab", [31, 96, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_leave_no_other_tokens(vocab: int, dtype: torch.dtype) -> None:
    """Rows without a mask stay as they are; words of only ones too, where there may be tokens that are banned."""
    name = str(dtype).removeprefix("torch.")
    generator = torch.Generator().manual_seed(vocab)
    rows, num_words = torch.tensor([0, 3, 4]), -(-vocab // 32)
    allowed = torch.rand(3, num_words * 32, generator=generator) < 0.5
    allowed[1, :32] = True
    allowed[2, :32] = False
    weights = 2 ** torch.arange(32, dtype=torch.int64)
    bits = (allowed.view(3, num_words, 32) * weights).sum(-1)
    bits = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)
    logits = random(6, vocab, dtype=dtype)
    logits[0, int(allowed[0].nonzero()[0])] = -torch.inf  # banned, and in a word with zeros
    for fused in (True, False):
        found = logits.clone()
        make_operations(name, fused=fused).mask(found, rows, bits)
        assert torch.equal(found[[1, 2, 5]], logits[[1, 2, 5]])
        assert torch.equal(found[rows] > -torch.inf, allowed[:, :vocab])
        may = allowed[:, :vocab] & (logits[rows] > -torch.inf)
        assert torch.equal(found[rows][may], logits[rows][may])
