"""Products of codes, against products in float64 of the numbers that the codes mean."""

import torch
from torch import Tensor

from services.engine.kernels.gpu.coded_linear import coded_product, rows_for
from services.engine.kernels.gpu.packed_codes import pack
from services.engine.quantization.codes import Code, CodedMatrix, Inputs
from tests.gpu.checks.buffers import within
from tests.gpu.checks.errors import compare
from tests.gpu.checks.result import Check
from tests.gpu.checks.source import DTYPES, Source, cases

_CODES = (Code.UINT4, Code.UINT4, Code.INT8, Code.E4M3, Code.E2M1)
_INPUTS = (
    (Code.INT8, Inputs.INT8),
    (Code.UINT4, Inputs.INT8),
    (Code.E4M3, Inputs.E4M3),
    (Code.E4M3, Inputs.E4M3_GROUPS),
)
_GROUPS = (16, 32, 64, 96, 128)


def check(device: torch.device, seed: int, num_cases: int) -> list[Check]:
    """Checks `num_cases` random cases of each."""
    return [*cases(_product, device, seed, num_cases), *cases(_product_of_bytes, device, seed, num_cases)]


def _product(source: Source, name: str) -> list[Check]:
    """One matrix or two, of one kind each, one below the other."""
    choices, dtype, num_rows = source.choices, source.choices.choice(DTYPES), source.num_rows()
    depth = _depth(source)
    matrices = tuple(
        random_matrix(source, choices.choice(_CODES), _out(source), depth) for _ in range(choices.randint(1, 2))
    )
    product = coded_product(matrices, bias := _bias(source, matrices, dtype))
    assert product is not None
    x = within(source.normal(num_rows, depth, dtype=dtype), depth + choices.choice((0, 24)))
    name = f"coded product {_words(matrices)} {num_rows} x {depth} {dtype} {name}"
    return [compare(name, product(x), _wide(x, matrices, bias), dtype)]


def _product_of_bytes(source: Source, name: str) -> list[Check]:
    """Inputs are rounded: the product of what they are rounded to, and of the rows themselves."""
    choices, dtype, num_rows = source.choices, source.choices.choice(DTYPES), source.num_rows()
    code, inputs = choices.choice(_INPUTS)
    group = None if inputs is Inputs.E4M3 else choices.choice((32, 64, 128))
    depth = _depth(source) if group is None else group * choices.randint(1, 6)
    matrix = random_matrix(source, code, _out(source), depth, group, inputs)
    product = coded_product((matrix,), bias := _bias(source, (matrix,), dtype))
    assert product is not None
    x = within(source.normal(num_rows, depth, dtype=dtype), depth + choices.choice((0, 24)))
    packed = pack(matrix)
    assert packed is not None
    rows = rows_for(packed, x)
    assert rows.scales is not None
    in_order = rows.numbers.double() * rows.scales.double().repeat_interleave(depth // rows.scales.shape[1], 1)
    rounded = in_order if matrix.order is None else torch.empty_like(in_order).index_copy_(1, matrix.order, in_order)
    y, about = product(x), f"coded product {_words((matrix,))} of {inputs.value} {num_rows} x {depth} {dtype} {name}"
    step = 1 / 253 if inputs is Inputs.INT8 else 1 / 27  # half of a step at a row's largest number, and a little
    return [
        compare(about, y, _wide(rounded, (matrix,), bias), dtype),
        Check(f"{about}, of the rows as they are", _distance(rounded, x.double()), step),
    ]


def random_matrix(
    source: Source,
    code: Code,
    out: int,
    depth: int,
    group: int | None = None,
    inputs: Inputs = Inputs.AS_THEY_ARE,
) -> CodedMatrix:
    """Makes a matrix whose numbers are about 1 / sqrt(depth). group: of one of several sizes if it is None."""
    choices, generator, device = source.choices, source.generator, source.device
    if group is None:
        group = choices.choice((*_GROUPS, depth)) if inputs is Inputs.AS_THEY_ARE else depth
    codes = torch.randint(0, 1 << code.bits, (out, depth), generator=generator).to(torch.uint8)
    if code is Code.E4M3:
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    dtype = choices.choice((torch.float32, torch.float16))
    size = float(code.values().nan_to_num().std()) * depth**0.5
    scales = ((torch.rand(out, -(-depth // group), generator=generator) + 0.5) / size).to(dtype)
    offsets = None
    if code is Code.UINT4:
        offsets = choices.choice(
            (scales * -8, (scales * torch.randint(-15, 1, scales.shape, generator=generator)).to(dtype))
        )
    order = torch.randperm(depth, generator=generator) if choices.random() < 0.2 else None
    return CodedMatrix(code, codes, scales, offsets, group, order, inputs).to(device)


def _out(source: Source) -> int:
    return source.choices.randint(1, 150 if source.device.type == "cpu" else 5000)


def _depth(source: Source) -> int:
    return source.choices.randint(1, 400 if source.device.type == "cpu" else 5000)


def _bias(source: Source, matrices: tuple[CodedMatrix, ...], dtype: torch.dtype) -> Tensor | None:
    has_bias = source.choices.random() < 0.5
    return within(source.normal(sum(matrix.shape[0] for matrix in matrices), dtype=dtype)) if has_bias else None


def _wide(x: Tensor, matrices: tuple[CodedMatrix, ...], bias: Tensor | None) -> Tensor:
    y = torch.cat([x.double() @ matrix.numbers(torch.float64).t() for matrix in matrices], dim=1)
    return y if bias is None else y + bias.double()


def _words(matrices: tuple[CodedMatrix, ...]) -> str:
    return " above ".join(
        f"{matrix.code.value} {matrix.shape[0]} by {matrix.group}{'' if matrix.order is None else ' ordered'}"
        for matrix in matrices
    )


def _distance(rounded: Tensor, x: Tensor) -> float:
    """Returns the largest error of a number, of its row's largest."""
    return float(((rounded - x).abs() / x.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)).max())
