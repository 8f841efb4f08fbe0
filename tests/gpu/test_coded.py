"""Linear layers of codes on Triton: products of what the codes mean, whatever the shapes."""

from dataclasses import replace

import pytest
import torch

from services.engine.kernels.gpu.coded_linear import CodedProduct, coded_product, rows_for
from services.engine.kernels.gpu.coded_product import FEW
from services.engine.kernels.gpu.packed_codes import CodeStack, pack
from services.engine.kernels.gpu.rows import quantize_rows
from services.engine.quantization.codes import Code, CodedMatrix, Inputs
from tests.engine.kernels.coded_matrices import KINDS, Kind, coded
from tests.gpu.checks import coded as checks
from tests.gpu.checks.buffers import within
from tests.gpu.checks.source import Source


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS[-3:], ids=str)
def test_scales_of_two_levels_are_multiplied_as_one(device: torch.device, kind: Kind) -> None:
    """And codes of 5 and 6 bits as bytes: GGUF's Q5_K, Q6_K and Q4_K."""
    matrix = coded(kind, 40, 512, 16 if kind.code is Code.INT6 else 32)
    product = coded_product((matrix.to(device),), None)
    assert product is not None
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))

    y = product(x.to(device)).cpu()

    torch.testing.assert_close(y, x @ matrix.numbers(torch.float32).T, atol=1e-4, rtol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(8))
def test_products_are_those_of_float64(device: torch.device, seed: int) -> None:
    found = checks.check(device, seed=seed, num_cases=3)

    assert [check for check in found if not check.ok] == []


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("code", Code)
@pytest.mark.parametrize("num_rows", [1, FEW + 1])
def test_every_code_means_its_number(device: torch.device, code: Code, dtype: torch.dtype, num_rows: int) -> None:
    """Each of the codes alone, in the input of its own: y is its number, exactly."""
    values = code.values()
    codes = torch.arange(len(values), dtype=torch.uint8)[:, None].expand(-1, len(values))
    matrix = CodedMatrix(code, codes.contiguous(), torch.ones(len(values), 1), None, len(values)).to(device)
    product = coded_product((matrix,), None)
    assert product is not None
    x = torch.zeros(num_rows, len(values), dtype=dtype, device=device)
    x[:, 7] = 1

    y = product(x)

    assert y.isnan().equal(values.isnan().to(device).expand_as(y))
    assert torch.equal(y.nan_to_num(), values.to(device, dtype).nan_to_num().expand_as(y))


@pytest.mark.few(1)
@pytest.mark.parametrize(("code", "inputs"), [(Code.UINT4, Inputs.AS_THEY_ARE), (Code.INT8, Inputs.INT8)])
def test_a_row_s_product_does_not_depend_on_the_rows_beside_it(
    device: torch.device, code: Code, inputs: Inputs
) -> None:
    source = Source(device, 3)
    matrix = replace(checks.random_matrix(source, code, 70, 320, 64, inputs), order=None)
    product = coded_product((matrix,), None)
    assert product is not None
    x = source.normal(FEW, 320, dtype=torch.bfloat16)

    together = product(x)

    assert torch.equal(product(x[5:6]), together[5:6])
    assert torch.equal(product(x[40:59]), together[40:59])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter: of NaN, which is what is tested
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_numbers_that_are_not_finite_stay_in_their_row(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.ones(3, 40, device=device)
    x[0, 3], x[1, 39] = torch.nan, -torch.inf

    _, scales = quantize_rows(x, dtype)

    assert scales.isfinite().flatten().tolist() == [False, False, True]


def test_codes_of_int8_are_the_nearest_ties_to_even(device: torch.device) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -3.5, 63.4, -126.6]], device=device)

    codes, scales = quantize_rows(x, torch.int8)

    assert scales.tolist() == [[1.0]]
    assert codes.tolist() == [[127, 0, 2, 2, 0, -4, 63, -127]]


@pytest.mark.parametrize(
    ("code", "group", "inputs"),
    [
        (Code.UINT4, 24, Inputs.AS_THEY_ARE),
        (Code.INT8, 16, Inputs.INT8),
        (Code.E2M1, 32, Inputs.INT8),
        (Code.INT8, 32, Inputs.E4M3),
        (Code.E4M3, 64, Inputs.E4M3_GROUPS),
    ],
)
def test_what_no_kernel_multiplies_is_left_to_others(
    device: torch.device, code: Code, group: int, inputs: Inputs
) -> None:
    matrix = replace(checks.random_matrix(Source(device, 1), code, 8, 96, group, inputs), order=None)
    fine = checks.random_matrix(Source(device, 1), Code.INT8, 8, 96, 32)

    assert coded_product((fine, matrix), None) is None


@pytest.mark.parametrize("centred", [0, 1])
def test_a_stack_keeps_offsets_if_one_of_its_matrices_needs_them(device: torch.device, centred: int) -> None:
    matrix = replace(checks.random_matrix(Source(device, 1), Code.UINT4, 8, 96, 32), order=None)
    offsets = [matrix.scales * -8, matrix.scales * -3][:: -1 if centred else 1]
    stack = CodeStack(2)

    assert all(stack.put(index, replace(matrix, offsets=own)) for index, own in enumerate(offsets))

    whole = stack.whole()
    assert whole.offsets is not None
    assert not whole.is_centred
    for index, own in enumerate(offsets):
        assert torch.equal(whole.offsets[index, :3, :8], own.t())


def test_packed_4_bit_codes_take_half_a_byte_each(device: torch.device) -> None:
    packed = pack(checks.random_matrix(Source(device, 1), Code.UINT4, 256, 512, 32))

    assert packed is not None
    assert packed.codes.nbytes == 256 * 512 // 2
    assert packed.codes.is_contiguous()
    assert packed.scales.shape == (16, 256)


def test_a_stack_takes_matrices_of_one_kind(device: torch.device) -> None:
    source, stack = Source(device, 1), CodeStack(2)
    first, other = (
        replace(checks.random_matrix(source, code, 8, 96, 32), order=None) for code in (Code.UINT4, Code.INT8)
    )

    assert stack.put(0, first)
    assert not stack.put(1, other)


def test_inputs_in_another_order_and_a_last_group_that_is_not_whole(device: torch.device) -> None:
    source = Source(device, 1)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1)).to(device)
    matrix = replace(checks.random_matrix(source, Code.UINT4, 40, 200, 64), order=order)
    product = coded_product((matrix,), None)
    assert product is not None
    x = source.normal(3, 200, dtype=torch.float32)

    torch.testing.assert_close(product(x), x @ matrix.numbers(torch.float32).T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_rows", [1, FEW + 1])
@pytest.mark.parametrize(("group", "depth"), [(48, 144), (96, 288)])
def test_padding_of_the_depth_beyond_the_last_group_has_scales(
    device: torch.device, group: int, depth: int, num_rows: int
) -> None:
    """A block has codes of the last group and, in its upper halves, padding of one that is not in the matrix. Memory
    behind the scales is NaN.
    """
    source = Source(device, 1)
    matrix = replace(checks.random_matrix(source, Code.UINT4, 40, depth, group), order=None)
    packed = pack(matrix, centres=False)
    assert packed is not None
    assert packed.offsets is not None
    product = CodedProduct([replace(packed, scales=within(packed.scales), offsets=within(packed.offsets))], None)
    x = source.normal(num_rows, depth, dtype=torch.float32)

    torch.testing.assert_close(product(x), x @ matrix.numbers(torch.float32).T, atol=1e-4, rtol=1e-4)


def test_each_group_of_inputs_is_rounded_with_a_scale_of_its_own(device: torch.device) -> None:
    source = Source(device, 1)
    matrix = checks.random_matrix(source, Code.E4M3, 8, 96, 32, Inputs.E4M3_GROUPS)
    weight = pack(replace(matrix, order=None))
    assert weight is not None
    x = source.normal(2, 96, dtype=torch.float32)
    x[:, :32] *= 1e6  # beside which the others were zeros in e4m3

    rows = rows_for(weight, x)

    assert rows.scales is not None
    read = rows.numbers.to(torch.float32) * rows.scales.repeat_interleave(32, dim=1)
    torch.testing.assert_close(read, x, rtol=1 / 16, atol=0.01)
