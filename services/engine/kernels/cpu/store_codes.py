"""The kernel that writes new K and V into a pool of codes of one byte."""

from typing import Any

from numba import float32

from services.engine.kernels.cpu.elements import ELEMENTS
from services.engine.kernels.cpu.intrinsics import float_pointer, long_pointer, njit
from services.engine.kernels.cpu.kv_forms import KvForm, make_encode
from services.engine.kernels.cpu.per_item import per_item, places


@per_item
def make_store_codes(dtype: str, form: KvForm) -> Any:
    """Makes a kernel that writes each token's K and V heads into the pool as codes, with their scales. An item is a
    token.

    Arguments of the kernel: those of `make_store_kv`, in bytes of the pool; then bytes from block to block, positions
    of a block, and static scales, float32[2, kv_heads], of K before V, or 0.
    """
    element, has_scales = ELEMENTS[dtype], form.has_token_scales
    encode, size = make_encode(form, dtype), element.size
    arg = places("k v stride kv_heads head_dim pool offsets head_stride plane block_stride block_size scales")

    @njit
    def work(a: Any, token: int, _thread: int) -> None:
        kv_heads, head_dim, offset = a[arg.kv_heads], a[arg.head_dim], long_pointer(a[arg.offsets])[token]
        position = offset % a[arg.block_stride] // head_dim
        behind = a[arg.block_size] * head_dim - position * head_dim + position * 4  # from a token's codes to its scale
        for head in range(kv_heads):
            source = (token * a[arg.stride] + head * head_dim) * size
            codes = a[arg.pool] + offset + head * a[arg.head_stride]
            for plane in range(2):
                static = float32(1) if has_scales else float_pointer(a[arg.scales])[plane * kv_heads + head]
                numbers = (a[arg.k] if plane == 0 else a[arg.v]) + source
                scale = encode(numbers, head_dim, codes + plane * a[arg.plane], static)
                if has_scales:
                    float_pointer(codes + plane * a[arg.plane] + behind)[0] = scale

    return work
