"""KV in codes of one byte, made and read with torch alone: what kernels are compared with."""

import torch
from torch import Tensor

from kvtransfer.layout import KvLayout

STATIC = torch.tensor([0.02, 0.035])  # scales of K and of V where they are static
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def coded_layout(form: str, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int) -> KvLayout:
    """form: a value of `KvForm`."""
    dtype = "int8" if form == "int8" else "float8_e4m3fn"
    return KvLayout(num_layers, num_kv_heads, head_dim, block_size, dtype, token_scales="static" not in form)


def static_scales(num_layers: int, num_kv_heads: int) -> Tensor:
    """float32[num_layers, 2, num_kv_heads], all different."""
    spread = torch.linspace(1, 2, num_layers * num_kv_heads).view(num_layers, 1, num_kv_heads)
    return (STATIC[None, :, None] * spread).contiguous()


def encode(numbers: Tensor, dtype: str, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """The codes of rows of numbers, uint8 like them, and each row's scale, float32. scale: a static one, or None."""
    numbers, largest = numbers.float(), _LARGEST[dtype]
    if scale is None:
        scale = numbers.abs().amax(-1) / torch.tensor(largest)
    scaled = numbers / scale[..., None].where(scale[..., None] != 0, 1)
    if dtype == "int8":
        return scaled.round().to(torch.int8).view(torch.uint8), scale
    return scaled.clamp(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8), scale


def decode(codes: Tensor, dtype: str, scale: Tensor) -> Tensor:
    """The numbers that codes stand for, in float64."""
    return codes.view(getattr(torch, dtype)).double() * scale.double()[..., None]


def put(pool: Tensor, layout: KvLayout, place: tuple[int, ...], position: int, codes: Tensor, scale: Tensor) -> None:
    """Writes a token's codes and scale into a plane. place: block, head, layer, plane."""
    plane = pool[place].view(-1)
    plane[position * layout.head_dim :][: layout.head_dim] = codes
    if layout.token_scales:
        plane[layout.block_size * layout.head_dim + 4 * position :][:4] = scale.reshape(1).view(torch.uint8)
