"""y = x Wᵀ + b, with the weight in the order that is read fastest.

Fused kernels compute products if there are any. Otherwise, on a CPU with bfloat16 instructions, bfloat16 weights are
re-ordered once for oneDNN; elsewhere, and in float32, the weight stays as it is. The loader of a model may supply
products of another kind, which keep their own form of the weight. Weights that are stored as codes are multiplied so
where a kernel can (`coded_linear`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from services.engine.kernels.ranks import RankLink
from services.engine.quantization.codes import CodedMatrix, stacked

if TYPE_CHECKING:
    from services.engine.kernels.cpu.coded_panels import CodedPanels

# oneDNN 3.12 splits some 300 to 1,200 rows badly over two threads. The linear layers of an 82M Llama took, on a Xeon
# with AMX: 256 rows 16 ms, 512 44, 1,024 93 (in pieces of 256: 68), 2,048 117 (136).
_PIECE, _MANY = 256, 1280

Product = Callable[[Tensor], Tensor]  # [rows, in] -> [rows, out]
MakeProduct = Callable[[Tensor, Tensor | None], Product]  # parameters: weight [out, in], bias [out]
Coded = tuple[CodedMatrix, ...]  # one below the other
MakeCodedProduct = Callable[[Coded, Tensor | None], Product | None]  # None: no kernel multiplies them


class KernelProduct(Protocol):
    """A linear layer by a kernel for CPUs. `__call__` maps [rows, in] to [rows, out]."""

    @property
    def can_gate(self) -> bool:
        """Returns True if `gated` is possible."""

    def columns(self, begin: int, end: int) -> "KernelProduct | None":
        """Returns a layer for some columns of y, which shares their weights; None: they cannot be shared."""

    def __call__(self, x: Tensor, *, gated: bool = False) -> Tensor:
        """gated: the result is SiLU of the first half of y times the second, [rows, out / 2]."""


@dataclass(frozen=True, slots=True)
class Join:
    """A function of what a rank's part of a layer makes of rows: what the layers of all ranks make of them together."""

    link: RankLink
    width: int | None = None  # of whole rows, of which each rank makes some columns; None: ranks' rows are added up

    @property
    def is_kernel(self) -> bool:
        """Returns True if one of our kernels joins."""
        return self.link.ranks.is_kernel

    def __call__(self, y: Tensor) -> Tensor:
        """Joins [rows, columns]. It may take over their memory."""
        return self.link.ranks.sum(y) if self.width is None else self.link.ranks.gather(y, self.width)


class Linear:
    """A linear layer for inference. It takes over `weight` [out, in] and `bias` [out] from the caller."""

    __slots__ = ("_join", "_kernel", "_multiply")

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, fused: bool = False, make_product: MakeProduct | None = None
    ) -> None:
        """fused: use a kernel for CPUs if there is one. make_product: makes the product instead of all other ways."""
        self._join: Join | None = None
        self._kernel: KernelProduct | None = None
        self._multiply: Product
        if make_product is not None:
            self._multiply = make_product(weight, bias)
        elif fused and weight.device.type == "cpu" and (kernel := _make_kernel(weight, bias)) is not None:
            self._multiply = self._kernel = kernel
        elif weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and _can_pack():
            self._multiply = partial(_multiply_packed, _pack(weight), bias)
        else:
            self._multiply = partial(functional.linear, weight=weight.contiguous(), bias=bias)

    def columns(self, begin: int, end: int) -> "Linear | None":
        """Returns a layer for some columns of y, which shares their weights; None: they cannot be shared."""
        kernel = None if self._kernel is None or self._join is not None else self._kernel.columns(begin, end)
        if kernel is None:
            return None
        return _of_kernel(kernel)

    def joined(self, join: Join) -> "Linear":
        """Returns the layer that all ranks have together, of one rank's layer, this one, whose weights it shares."""
        layer = Linear.__new__(Linear)
        layer._join, layer._kernel, layer._multiply = join, self._kernel, self._multiply
        return layer

    @property
    def is_kernel(self) -> bool:
        """Returns True if one of our kernels multiplies, on the CPU, and another one joins what ranks have."""
        return self._kernel is not None and (self._join is None or self._join.is_kernel)

    def __call__(self, x: Tensor) -> Tensor:
        """Maps [rows, in] to [rows, out]."""
        y = self._multiply(x)
        return y if self._join is None else self._join(y)

    def gated(self, x: Tensor, silu_mul: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns SiLU of the first half of y times the second, [rows, in] -> [rows, out / 2]."""
        if self._kernel is None or not self._kernel.can_gate or self._join is not None:
            return silu_mul(self(x))
        return self._kernel(x, gated=True)


def _multiply_packed(packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    pieces = [_multiply_piece(packed, bias, piece) for piece in _in_pieces(x)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _multiply_piece(packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


def _in_pieces(x: Tensor) -> tuple[Tensor, ...]:
    """Cuts [T, width] into pieces of the number of rows with which oneDNN is fastest, one after the other."""
    return (x,) if len(x) >= _MANY else x.split(_PIECE)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PIECE)
    return packed


def _can_pack() -> bool:
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def coded_linear(matrices: Coded, bias: Tensor | None, make_product: MakeCodedProduct) -> Linear | None:
    """Makes a linear layer of codes; None: no kernel multiplies them."""
    product = make_product(matrices, bias)
    if product is None:
        return None
    layer = Linear.__new__(Linear)
    layer._join, layer._kernel, layer._multiply = None, None, product
    return layer


def coded_kernel(matrices: Coded, bias: Tensor | None, dtype: torch.dtype) -> Linear | None:
    """Makes a linear layer of codes, for x of this dtype, by a kernel for CPUs; None: there is none for them."""
    from services.engine.kernels.cpu import int8_linear
    from services.engine.kernels.cpu.coded_linear import CodedLinear, can_multiply

    if int8_linear.can_multiply(matrices, dtype):
        return _of_kernel(int8_linear.Int8Linear(matrices, bias, dtype))
    if not can_multiply(matrices, dtype):
        return None
    return _of_kernel(CodedLinear(matrices, bias, dtype))


def coded_panels(matrices: Sequence[CodedMatrix], dtype: torch.dtype) -> "CodedPanels | None":
    """Packs a matrix of codes for kernels for CPUs, with x and rows of this dtype; None: there are none for it."""
    from services.engine.kernels.cpu.coded_linear import can_multiply
    from services.engine.kernels.cpu.coded_panels import pack_codes

    whole = stacked(matrices)
    return pack_codes(whole[0]) if len(whole) == 1 and can_multiply(whole, dtype) else None


def of_panels(panels: "CodedPanels", dtype: torch.dtype) -> Linear:
    """Makes a linear layer of packed codes, for x of this dtype, without a bias."""
    from services.engine.kernels.cpu.coded_linear import CodedLinear

    return _of_kernel(CodedLinear.of_panels(panels, dtype))


def _of_kernel(kernel: KernelProduct) -> Linear:
    layer = Linear.__new__(Linear)
    layer._join, layer._multiply, layer._kernel = None, kernel, kernel
    return layer


def _make_kernel(weight: Tensor, bias: Tensor | None) -> KernelProduct | None:
    from services.engine.kernels.cpu.packed_linear import PackedLinear, can_pack

    return PackedLinear(weight, bias) if can_pack(weight) else None
