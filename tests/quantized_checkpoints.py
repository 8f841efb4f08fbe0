"""Turns checkpoints into quantized ones, of each way of storing, and says which numbers they then mean.

The numbers are computed in float64 from integers, zero points and scales, by the formats' definitions; the packing is
written here once more, word by word, so that nothing of what reads checkpoints is used.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints import edit_json, save_tensors

SEED = 5
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
Parts = dict[str, Tensor]  # by the ends of their names
Numbers = np.ndarray  # float64[out, in]


@dataclass(frozen=True)
class Way:
    """One way of storing: `quantization_config`, and what makes a layer's tensors, with the numbers that they mean."""

    config: dict[str, Any]
    store: Callable[[Tensor], tuple[Parts, Numbers]]
    multiple: int = 1  # of which both sizes of a weight must be


@dataclass(frozen=True)
class Integers:
    """A weight [out, in] in integers: number = scale * (code - zero)."""

    codes: np.ndarray  # int64[out, in], 0 to 2 ** bits - 1
    zeros: np.ndarray  # int64[out, groups]
    scales: Tensor  # [out, groups]
    groups: np.ndarray  # int64[in]: the group of each input

    @property
    def numbers(self) -> Numbers:
        scales = self.scales.to(torch.float64).numpy()
        found: Numbers = (self.codes - self.zeros[:, self.groups]) * scales[:, self.groups]
        return found


def integers(
    weight: Tensor,
    bits: int,
    group: int | None,
    *,
    symmetric: bool,
    ordered: bool = False,
    dtype: torch.dtype = torch.float16,
    least_zero: int = 0,
) -> Integers:
    """Rounds a weight to integers in groups of a row; None: a group for each row. ordered: inputs are in any groups."""
    rows, last = weight.to(torch.float64).numpy(), (1 << bits) - 1
    depth = rows.shape[1]
    groups = np.arange(depth) // (group or depth)
    if ordered:
        groups = np.random.default_rng(SEED).permutation(groups)
    num_groups = groups.max() + 1
    low, high = (
        np.stack([part(rows[:, groups == one], axis=1) for one in range(num_groups)], axis=1)
        for part in (np.min, np.max)
    )
    if symmetric:
        scales, zeros = np.maximum(-low, high) / (last // 2), np.full(low.shape, (last + 1) // 2)
    else:
        scales = (np.maximum(high, 0) - np.minimum(low, 0)) / (last - least_zero)
        zeros = np.clip(np.rint(-np.minimum(low, 0) / scales), least_zero, last).astype(np.int64)
    stored = torch.from_numpy(scales).to(dtype)
    steps = np.rint(rows / stored.to(torch.float64).numpy()[:, groups])
    codes = np.clip(steps + zeros[:, groups], 0, last).astype(np.int64)
    return Integers(codes, zeros, stored, groups)


def packed(codes: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Puts 32 / bits numbers that lie along an axis into a word, the first one lowest. order: that of the numbers in
    a word. What is missing in the last word is 0.
    """
    of_word = 32 // bits
    lines = np.moveaxis(codes, axis, -1)
    lines = np.pad(lines, ((0, 0), (0, -lines.shape[1] % of_word)))
    words = np.zeros((lines.shape[0], lines.shape[1] // of_word), dtype=np.uint32)
    for place, number in enumerate(order or range(of_word)):
        words |= lines[:, number::of_word].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32))


def awq(group: int) -> Way:
    def store(weight: Tensor) -> tuple[Parts, Numbers]:
        found, turns = integers(weight, 4, None if group == -1 else group, symmetric=False), (0, 2, 4, 6, 1, 3, 5, 7)
        parts = {
            ".qweight": packed(found.codes.T, 4, 1, turns),
            ".qzeros": packed(found.zeros.T, 4, 1, turns),
            ".scales": found.scales.T,
        }
        return parts, found.numbers

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Way(config, store, 8)


def gptq(bits: int, group: int, *, symmetric: bool = True, ordered: bool = False, second: bool = False) -> Way:
    """second: the second version, with zero points as they are."""

    def store(weight: Tensor) -> tuple[Parts, Numbers]:
        of_row = None if group == -1 else group
        least = 0 if second else 1  # the first version has no zero point of 0
        found = integers(
            weight, bits, of_row, symmetric=symmetric, ordered=ordered, least_zero=0 if symmetric else least
        )
        parts = {
            ".qweight": packed(found.codes.T, bits, 0),
            ".qzeros": packed(found.zeros.T - (0 if second else 1), bits, 1),
            ".scales": found.scales.T,
            ".g_idx": torch.from_numpy(found.groups.astype(np.int32)),
        }
        return parts, found.numbers

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": ordered,
        "sym": symmetric,
        "checkpoint_format": "gptq_v2" if second else "gptq",
        "lm_head": False,
        "damp_percent": 0.01,
        "true_sequential": True,
    }
    return Way(config, store, 32 // bits)


def compressed_ints(
    bits: int,
    strategy: str,
    group: int | None = None,
    *,
    symmetric: bool = True,
    ordered: bool = False,
    is_packed: bool = True,
    inputs: str | None = None,
) -> Way:
    """inputs: `dynamic` or `static` integers of 8 bits."""

    def store(weight: Tensor) -> tuple[Parts, Numbers]:
        source, dtype = weight, torch.bfloat16
        if strategy == "tensor":
            source = weight.reshape(1, -1)
        found = integers(source, bits, group, symmetric=symmetric, ordered=ordered, dtype=dtype)
        codes, middle = found.codes.reshape(weight.shape), 1 << (bits - 1)
        parts = {".weight_scale": found.scales.reshape(1) if strategy == "tensor" else found.scales}
        if is_packed:
            parts |= {".weight_packed": packed(codes, bits, 1), ".weight_shape": torch.tensor(weight.shape)}
        else:
            parts[".weight"] = torch.from_numpy((codes - middle).astype(np.int8))
        if not symmetric and is_packed and strategy != "tensor":
            parts[".weight_zero_point"] = packed(found.zeros, bits, 0)
        elif not symmetric:
            zeros = torch.from_numpy((found.zeros - middle).astype(np.int8))
            parts[".weight_zero_point"] = zeros.reshape(1) if strategy == "tensor" else zeros
        if ordered:
            parts[".weight_g_idx"] = torch.from_numpy(found.groups.astype(np.int32))
        if inputs == "static":
            parts[".input_scale"] = torch.tensor([0.1], dtype=dtype)
        return parts, found.numbers.reshape(weight.shape)

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "dynamic": False}
    weights |= {"group_size": group, "actorder": "group" if ordered else None, "observer": "minmax"}
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": inputs == "dynamic"}
    activations["strategy"] = "token" if inputs == "dynamic" else "tensor"
    return Way(
        compressed_config(weights, "pack-quantized" if is_packed else "int-quantized", activations if inputs else None),
        store,
    )


def compressed_config(weights: Mapping[str, Any], stored_as: str, inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "format": stored_as,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "version": "0.9.4",
    }


def as_float8(weight: Tensor, spread: Callable[[Tensor], Tensor], scales: Tensor) -> tuple[Tensor, Numbers]:
    """Rounds a weight to e4m3. spread: makes a scale for each number out of the scales."""
    wide = spread(scales.to(torch.float64))
    stored = (weight.to(torch.float64) / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    return stored, (stored.to(torch.float64) * wide).numpy()


def float8(
    per: str,
    end: str = ".weight_scale_inv",
    *,
    config: dict[str, Any],
    input_end: str | None = None,
    block: int = 128,
) -> Way:
    """per: tensor, channel or block."""

    def store(weight: Tensor) -> tuple[Parts, Numbers]:
        high, wide = (-(-size // block) for size in weight.shape)
        if per == "tensor":
            scales = weight.abs().max().reshape(()) / 448
            codes, numbers = as_float8(weight, lambda one: one.expand(weight.shape), scales)
        elif per == "channel":
            scales = weight.abs().amax(dim=1, keepdim=True) / 448
            codes, numbers = as_float8(weight, lambda some: some.expand(weight.shape), scales)
        else:
            padded = torch.zeros(high * block, wide * block)
            padded[: weight.shape[0], : weight.shape[1]] = weight.abs()
            scales = padded.reshape(high, block, wide, block).amax(dim=(1, 3)) / 448
            spread = lambda some: some.repeat_interleave(block, 0).repeat_interleave(block, 1)
            codes, numbers = as_float8(weight, lambda some: spread(some)[: weight.shape[0], : weight.shape[1]], scales)
        parts = {".weight": codes, end: scales}
        return parts | ({input_end: torch.tensor([0.2])} if input_end else {}), numbers

    return Way(config, store)


DEEPSEEK = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "channel"}

WAYS: dict[str, Way] = {
    "fp8-blocks": float8("block", config=DEEPSEEK),
    "fp8-small-blocks": float8("block", config=DEEPSEEK | {"weight_block_size": [24, 24]}, block=24),
    "fp8-static": float8(
        "tensor",
        ".weight_scale",
        config={"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        input_end=".input_scale",
    ),
    "fp8-rows": float8(
        "channel", ".weight_scale", config={"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}
    ),
    "w8a8-float": float8(
        "channel",
        ".weight_scale",
        config=compressed_config(_FLOAT, "float-quantized", _FLOAT | {"dynamic": True, "strategy": "token"}),
    ),
    "w8a8-float-blocks": float8(
        "block",
        ".weight_scale",
        config=compressed_config(_FLOAT | {"strategy": "block", "block_structure": [40, 40]}, "float-quantized", None),
        block=40,
    ),
    "awq": awq(32),
    "awq-rows": awq(-1),
    "gptq-4": gptq(4, 32),
    "gptq-4-rows-asymmetric": gptq(4, -1, symmetric=False),
    "gptq-4-ordered": gptq(4, 32, symmetric=False, ordered=True),
    "gptq-4-short-group": gptq(4, 40),
    "gptq-8": gptq(8, 32),
    "gptq-8-ordered-v2": gptq(8, 16, symmetric=False, ordered=True, second=True),
    "w4a16": compressed_ints(4, "group", 32),
    "w4a16-asymmetric": compressed_ints(4, "group", 16, symmetric=False),
    "w4a16-ordered": compressed_ints(4, "group", 32, ordered=True),
    "w4a16-rows-asymmetric": compressed_ints(4, "channel", symmetric=False),
    "w4a16-tensor": compressed_ints(4, "tensor"),
    "w8a16": compressed_ints(8, "channel"),
    "w8a16-asymmetric": compressed_ints(8, "group", 32, symmetric=False),
    "w8a8": compressed_ints(8, "channel", is_packed=False, inputs="dynamic"),
    "w8a8-static": compressed_ints(8, "tensor", is_packed=False, inputs="static"),
    "w8a8-asymmetric": compressed_ints(8, "channel", symmetric=False, is_packed=False, inputs="dynamic"),
}


def is_quantized(name: str) -> bool:
    """True for the weights that methods quantize by default: the linear layers but the last, and no router."""
    return name.endswith("proj.weight") or ".experts." in name


def write_quantized(directory: Path, checkpoint: Path, way: Way) -> dict[str, Tensor]:
    """Writes a checkpoint's quantized form to a directory, and in it, in `numbers`, a plain checkpoint of the numbers
    that it means. Returns those, float32.
    """
    shutil.copytree(checkpoint, directory, dirs_exist_ok=True)
    shutil.copytree(checkpoint, directory / "numbers", dirs_exist_ok=True)
    tensors, meant = load_file(checkpoint / "model.safetensors"), dict[str, Tensor]()
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if is_quantized(name):
            parts, numbers = way.store(tensor)
            stored |= {f"{name.removesuffix('.weight')}{end}": part for end, part in parts.items()}
            meant[name] = torch.from_numpy(numbers).to(torch.float32)
        else:
            stored[name] = meant[name] = tensor
    save_tensors(directory / "model.safetensors", stored)
    save_tensors(directory / "numbers" / "model.safetensors", meant)
    edit_json(directory / "config.json", quantization_config=dict(way.config))
    return meant


def write_mxfp4(directory: Path, checkpoint: Path) -> dict[str, Tensor]:
    """Writes a checkpoint of gpt-oss with its experts in MXFP4, as `write_quantized` does."""
    shutil.copytree(checkpoint, directory, dirs_exist_ok=True)
    shutil.copytree(checkpoint, directory / "numbers", dirs_exist_ok=True)
    stored, meant = load_file(checkpoint / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        rows = stored.pop(name).transpose(1, 2).to(torch.float64)  # [experts, out, in]
        blocks = rows.unflatten(2, (-1, 32))
        exponents = torch.floor(torch.log2(blocks.abs().amax(dim=3))) - 2
        steps = blocks / torch.exp2(exponents)[..., None]
        codes = (steps[..., None] - torch.tensor(E2M1, dtype=torch.float64)).abs().argmin(dim=-1)
        numbers = torch.tensor(E2M1, dtype=torch.float64)[codes] * torch.exp2(exponents)[..., None]
        stored[f"{name}_blocks"] = (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
        stored[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
        meant[name] = numbers.flatten(2).transpose(1, 2).to(torch.float32)
    save_tensors(directory / "model.safetensors", stored)
    save_tensors(directory / "numbers" / "model.safetensors", meant)
    edit_json(directory / "config.json", quantization_config=MXFP4)
    return meant
